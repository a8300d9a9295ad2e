"""Supervised examples, their plan and their microbatches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.config import StyleConfig
from t2g.errors import UserError
from t2g.feedback.examples import (
    SFTExample,
    decisive_weights,
    make_microbatch,
    plan_epochs,
    policy_examples,
    reward_examples,
    sft_example,
    target_ids,
)
from t2g.feedback.parse import Quote, format_answer
from t2g.feedback.records import read_record
from t2g.tasks.prompts_only import PromptsTask
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.text.offsets import decode
from t2g.text.tokenizer import encode_chat


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Nothing but bytes: one token a byte, so that positions can be counted by hand."""
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["x"], vocab_size=261)


def example(prompt: list[int], target: list[int], weights: list[float]) -> SFTExample:
    return SFTExample(
        prompt_ids=np.array(prompt, np.int32),
        target_ids=np.array(target, np.int32),
        target_weights=np.array(weights, np.float32),
    )


def test_target_ends_with_eos(tokenizer: Any) -> None:
    ids = target_ids("hé", tokenizer)
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) == 1 + 2 + 1
    assert ids.dtype == np.int32


def test_a_special_token_in_the_text_stays_text(tokenizer: Any) -> None:
    ids = target_ids("a<|end|>b", tokenizer)
    assert decode(tokenizer, ids) == "a<|end|>b"
    assert (ids == tokenizer.eos_token_id).tolist() == [False] * 9 + [True]


def test_target_without_eos_is_refused(tmp_path: Path) -> None:
    bare = build_tokenizer(tmp_path, ["x"], vocab_size=261)
    bare.eos_token = None
    with pytest.raises(UserError, match="eos_token"):
        target_ids("x", bare)


def test_example_weighs_the_decisive_characters(tokenizer: Any) -> None:
    made = sft_example(
        lambda room: np.array([1, 2]), "aé: no.", tokenizer, max_length=20, ranges=[(1, 2), (4, 6)], span_weight=8.0
    )
    # bytes: a | C3 | A9 | : | blank | n | o | . and EOS; the accented e is character 1 and two tokens
    assert made.target_weights.tolist() == [1, 8, 8, 1, 1, 8, 8, 1, 1]
    assert made.prompt_ids.tolist() == [1, 2]
    assert len(made) == 2 + 9


def test_the_prompt_gets_the_room_that_the_target_leaves(tokenizer: Any) -> None:
    rooms = []

    def build(room: int) -> np.ndarray:
        rooms.append(room)
        return np.arange(room)

    assert len(sft_example(build, "abc", tokenizer, max_length=10)) == 10
    assert rooms == [10 - 4]
    with pytest.raises(UserError, match=r"target of 4 tokens .*max_length=4"):
        sft_example(build, "abc", tokenizer, max_length=4)


def test_touching_a_range_is_not_sharing_a_character() -> None:
    offsets = np.array([[0, 2], [2, 4], [4, 4], [4, 6]])
    assert decisive_weights(offsets, [(2, 4)], 3.0).tolist() == [1, 3, 1, 1]
    assert decisive_weights(offsets, [], 3.0).tolist() == [1, 1, 1, 1]


def test_span_map_begins_after_the_critique_whatever_it_says() -> None:
    nasty = 'He wrote "x", "good": ["y"], "poor": [] and {"critique": "'
    answer = format_answer(nasty, [Quote(quote="a")], [Quote(quote="b", occurrence=2)])
    ((start, end),) = PromptsTask().decisive_ranges(answer)
    assert answer[start:end] == '"good": ["a"], "poor": [{"quote": "b", "occurrence": 2}]}'
    assert PromptsTask().decisive_ranges('{"good": [], "poor": []}') == [(1, 24)]


def test_microbatch_shifts_labels_to_the_column_that_predicts_them() -> None:
    batch = make_microbatch([example([1, 2, 3], [4, 5], [1, 8]), example([6], [7], [2])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2  # a restart would be a packed row
    assert batch.columns.tolist() == [0, 1, 2, 3, 4]  # few: all are computed
    assert batch.labels.tolist() == [[0, 0, 4, 5, 0], [7, 0, 0, 0, 0]]
    assert batch.weights.tolist() == [[0, 0, 1, 8, 0], [2, 0, 0, 0, 0]]


def test_a_packed_microbatch_is_one_row() -> None:
    batch = make_microbatch([example([1, 2, 3], [4, 5], [1, 8]), example([6], [7], [2])], packed=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.labels.tolist() == [[0, 0, 4, 5, 0, 7, 0]]
    assert batch.weights.tolist() == [[0, 0, 1, 8, 0, 2, 0]]


def test_logits_are_computed_where_a_token_counts() -> None:
    batch = make_microbatch([example([1] * 60, [4] * 40, [2] * 40), example([1] * 50, [5], [3])])
    assert batch.input_ids.shape == (2, 100)
    assert batch.columns.tolist() == [49, *range(59, 99)]
    assert batch.labels.tolist() == [[0] + [4] * 40, [5] + [0] * 40]
    assert batch.weights.tolist() == [[0] + [2] * 40, [3] + [0] * 40]


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_without_examples_gets_a_row_of_no_weight(packed: bool) -> None:
    batch = make_microbatch([], packed=packed)
    assert batch.input_ids.shape == batch.position_ids.shape == (1, len(batch.columns))
    assert len(batch.columns) > 4
    assert batch.weights.sum() == 0


def test_packed_steps_hold_the_same_examples_in_fewer_microbatches() -> None:
    shared = {"num_epochs": 2, "batch_size": 6, "num_ranks": 1, "token_budget": 20, "seed": 5}
    padded, packed = (plan_epochs([3, 17, 5, 15, 8, 12], **shared, packed=flag) for flag in (False, True))
    assert [sorted(i for rows in step[0] for i in rows) for step in packed] == [list(range(6))] * 2
    assert [len(step[0]) for step in padded] == [5, 5]
    for step in packed:
        assert {frozenset(rows) for rows in step[0]} == {frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})}


def test_half_an_epoch_and_two_and_a_half() -> None:
    def drawn(num_epochs: float) -> list[list[int]]:
        plan = plan_epochs([3] * 6, num_epochs=num_epochs, batch_size=4, num_ranks=1, token_budget=100, seed=5)
        return [sorted(i for hand in step for rows in hand for i in rows) for step in plan]

    assert [len(step) for step in drawn(0.5)] == [3]
    assert [len(step) for step in drawn(2.5)] == [4, 4, 4, 3]
    counts = np.bincount(np.concatenate(drawn(2.5)), minlength=6)
    assert sorted(counts) == [2, 2, 2, 3, 3, 3]  # two whole epochs and half of one
    assert drawn(2.5)[0] == drawn(1)[0]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    num_epochs=st.integers(1, 3),
    batch_size=st.integers(1, 12),
    num_ranks=st.integers(1, 4),
    token_budget=st.integers(1, 120),
    seed=st.integers(0, 5),
)
def test_plan_draws_every_example_once_an_epoch(
    lengths: list[int], num_epochs: int, batch_size: int, num_ranks: int, token_budget: int, seed: int
) -> None:
    plan = plan_epochs(
        lengths, num_epochs=num_epochs, batch_size=batch_size, num_ranks=num_ranks, token_budget=token_budget, seed=seed
    )
    alone = plan_epochs(
        lengths, num_epochs=num_epochs, batch_size=batch_size, num_ranks=1, token_budget=token_budget, seed=seed
    )
    draws: list[list[int]] = []
    for step, step_alone in zip(plan, alone, strict=True):
        assert len(step) == num_ranks
        assert len({len(hand) for hand in step}) == 1  # the same number of collective calls
        assert step[0]
        chosen = [index for hand in step for rows in hand for index in rows]
        assert sorted(chosen) == sorted(index for rows in step_alone[0] for index in rows)
        for rows in (rows for hand in step for rows in hand):
            assert len(rows) <= 1 or len(rows) * max(lengths[i] for i in rows) <= token_budget
        draws.append(chosen)
    assert [len(step) for step in draws[:-1]] == [batch_size] * (len(draws) - 1)
    assert (np.bincount(np.concatenate(draws), minlength=len(lengths)) == num_epochs).all()


def test_policy_examples_name_the_record_that_is_wrong(tokenizer: Any) -> None:
    records = [{"prompt": "one", "reference": "eins"}, {"prompt": "two"}]
    (first,) = policy_examples(records[:1], PromptsTask(), tokenizer, max_length=64)
    assert decode(tokenizer, first.target_ids) == "eins"
    assert first.prompt_ids.tolist() == encode_chat(tokenizer, [{"role": "user", "content": "one"}])
    with pytest.raises(UserError, match=r"data record 2: .*no reference"):
        policy_examples(records, PromptsTask(), tokenizer, max_length=64)
    with pytest.raises(UserError, match=r"data record 1: .*max_length=5"):
        policy_examples(records, PromptsTask(), tokenizer, max_length=5)


def test_reward_examples_learn_the_answer_and_cut_input_text_only(tokenizer: Any) -> None:
    row = {"prompt": "long " * 400, "response": "by Zoë", "critique": "Right.", "good": ["Zoë"], "poor": []}
    failed = {**row, "status": "failed"}
    task = PromptsTask()
    (made,) = reward_examples(
        [read_record(row), read_record(failed)], task, tokenizer, max_length=1200, span_weight=4.0
    )
    answer = '{"critique": "Right.", "good": ["Zoë"], "poor": []}'
    assert decode(tokenizer, made.target_ids) == answer
    assert made.target_weights.sum() == len(made.target_ids) + 3 * len(answer[answer.index('"good"') :].encode())
    assert len(made) <= 1200
    read = decode(tokenizer, made.prompt_ids)
    assert read.startswith(task.feedback_messages(read_record(row).to_prompt(), "by Zoë", 0)[0]["content"][:200])
    assert read.endswith("Response:\nby Zoë")
    assert 0 < read.count("long ") < 400
    with pytest.raises(UserError, match="none of the 1 annotated records can be used; none has feedback"):
        reward_examples([read_record(failed)], task, tokenizer, max_length=1200, span_weight=4.0)


def test_records_that_do_not_fit_are_left_out_and_named(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt_id": "a", "prompt": "p", "response": "r", "critique": "c", "good": [], "poor": []}
    short, long = read_record(row), read_record({**row, "prompt_id": "b", "critique": "c" * 2000})
    options = {"max_length": 1200, "span_weight": 4.0}
    assert len(reward_examples([short, *[long] * 6, short], PromptsTask(), tokenizer, **options)) == 2
    # 14 characters, the 2,000 of the critique, 26 characters, EOS
    why = "a target of 2041 tokens leaves no room for its prompt in sft.max_length=1200"
    assert "6 annotated records are left out; record 2 (prompt b): " + why in caplog.text
    assert "record 6" in caplog.text and "record 7" not in caplog.text and "and 1 more" in caplog.text
    with pytest.raises(UserError, match=r"none of the 1 annotated records can be used; record 1 .*2041 tok"):
        reward_examples([long], PromptsTask(), tokenizer, **options)


def test_without_a_critique_the_target_is_the_span_map_and_weighs_as_a_whole(tokenizer: Any) -> None:
    row = {"prompt": "p", "response": "by Zoë", "critique": "Right.", "good": ["Zoë"], "poor": []}
    task, style = PromptsTask(), StyleConfig(critique=False)
    (made,) = reward_examples([read_record(row)], task, tokenizer, max_length=2000, span_weight=4.0, style=style)
    assert decode(tokenizer, made.target_ids) == '{"good": ["Zoë"], "poor": []}'
    assert made.target_weights.tolist() == [1.0] + [4.0] * (len(made.target_ids) - 2) + [1.0]  # brace and EOS
    asked = task.feedback_messages(read_record(row).to_prompt(), "by Zoë", style=style)
    assert decode(tokenizer, made.prompt_ids) == asked[0]["content"]


class Decided(PromptsTask):
    """A task that says which characters of an answer decide."""

    def decisive_ranges(self, answer: str) -> list[tuple[int, int]]:
        return [(0, 3)]


def test_a_task_may_say_what_is_decisive(tokenizer: Any) -> None:
    row = read_record({"prompt": "p", "response": "r", "critique": "c", "good": [], "poor": []})
    (made,) = reward_examples([row], Decided(), tokenizer, max_length=1200, span_weight=4.0)
    assert made.target_weights.tolist() == [4.0] * 3 + [1.0] * (len(made.target_ids) - 3)
