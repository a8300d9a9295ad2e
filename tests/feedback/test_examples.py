"""Supervised examples."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2g.config import StyleConfig
from t2g.errors import UserError
from t2g.feedback.examples import (
    encode_target,
    make_policy_examples,
    make_reward_examples,
    make_sft_example,
)
from t2g.feedback.records import read_record
from t2g.tasks.prompts_only import PromptsTask
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.text.offsets import decode
from t2g.text.tokenizer import encode_chat


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Nothing but bytes: one token a byte, so that positions can be counted by hand."""
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["x"], vocab_size=261)


def test_target_ends_with_eos(tokenizer: Any) -> None:
    ids = encode_target("hé", tokenizer)
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) == 1 + 2 + 1
    assert ids.dtype == np.int32


def test_a_special_token_in_the_text_stays_text(tokenizer: Any) -> None:
    ids = encode_target("a<|end|>b", tokenizer)
    assert decode(tokenizer, ids) == "a<|end|>b"
    assert (ids == tokenizer.eos_token_id).tolist() == [False] * 9 + [True]


def test_target_without_eos_is_refused(tmp_path: Path) -> None:
    bare = build_tokenizer(tmp_path, ["x"], vocab_size=261)
    bare.eos_token = bare.chat_template = None
    with pytest.raises(UserError, match="eos_token"):
        encode_target("x", bare)


def test_the_prompt_gets_the_room_that_the_target_leaves(tokenizer: Any) -> None:
    rooms = []

    def build(room: int) -> np.ndarray:
        rooms.append(room)
        return np.arange(room)

    assert len(make_sft_example(build, "abc", tokenizer, max_length=10)) == 10
    assert rooms == [10 - 4]
    with pytest.raises(UserError, match=r"target of 4 tokens .*max_length=4"):
        make_sft_example(build, "abc", tokenizer, max_length=4)


def test_policy_examples_name_the_record_that_is_wrong(tokenizer: Any) -> None:
    records = [{"prompt": "one", "reference": "eins"}, {"prompt": "two"}]
    (first,) = make_policy_examples(records[:1], PromptsTask(), tokenizer, max_length=64)
    assert decode(tokenizer, first.response_ids) == "eins"
    assert first.prompt_ids.tolist() == encode_chat(tokenizer, [{"role": "user", "content": "one"}])
    with pytest.raises(UserError, match=r"data record 2: .*no reference"):
        make_policy_examples(records, PromptsTask(), tokenizer, max_length=64)
    with pytest.raises(UserError, match=r"data record 1: .*max_length=5"):
        make_policy_examples(records, PromptsTask(), tokenizer, max_length=5)


def test_references_that_are_too_long_are_skipped(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    records = [{"prompt": "Why?", "reference": reference} for reference in ("x", "x" * 400)]
    make = partial(make_policy_examples, task=PromptsTask(), tokenizer=tokenizer, max_length=100)
    assert len(make(records, too_long="skip")) == 1
    assert "1 of 2 prompts or references are too long" in caplog.text
    with pytest.raises(UserError, match=r"record 2: a target of .* tokens leaves no room"):
        make(records, too_long="error")
    with pytest.raises(UserError, match=r"all 1 records are too long for sft\.max_length=100"):
        make(records[1:], too_long="skip")


def test_reward_examples_learn_the_answer_and_cut_input_text_only(tokenizer: Any) -> None:
    row = {"prompt": "long " * 400, "response": "by Zoë", "critique": "Right.", "good": ["Zoë"], "poor": []}
    failed = {**row, "status": "failed"}
    task = PromptsTask()
    (example,) = make_reward_examples([read_record(row), read_record(failed)], task, tokenizer, max_length=1200)
    answer = '{"critique": "Right.", "good": ["Zoë"], "poor": []}'
    assert decode(tokenizer, example.response_ids) == answer
    assert example.weights.tolist() == [1.0] * len(example.response_ids)
    assert len(example) <= 1200
    read = decode(tokenizer, example.prompt_ids)
    assert read.startswith(task.feedback_messages(read_record(row).to_prompt(), "by Zoë", 0)[0]["content"][:200])
    assert read.endswith("Response:\nby Zoë")
    assert 0 < read.count("long ") < 400
    with pytest.raises(UserError, match="none of the 1 annotated records can be used; none has feedback"):
        make_reward_examples([read_record(failed)], task, tokenizer, max_length=1200)


def test_records_that_do_not_fit_are_left_out_and_named(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt_id": "a", "prompt": "p", "response": "r", "critique": "c", "good": [], "poor": []}
    short = read_record(row)
    long = read_record({**row, "prompt_id": "b", "critique": "c" * 2000})
    options = {"max_length": 1200}
    assert len(make_reward_examples([short, *[long] * 6, short], PromptsTask(), tokenizer, **options)) == 2
    # 14 characters, the 2,000 of the critique, 26 characters, EOS
    why = "a target of 2041 tokens leaves no room for its prompt in sft.max_length=1200"
    assert "6 annotated records are left out; record 2 (prompt b): " + why in caplog.text
    assert "record 6" in caplog.text
    assert "record 7" not in caplog.text
    assert "and 1 more" in caplog.text
    with pytest.raises(UserError, match=r"none of the 1 annotated records can be used; record 1 .*2041 tok"):
        make_reward_examples([long], PromptsTask(), tokenizer, **options)


def test_without_a_critique_the_target_is_the_span_map(tokenizer: Any) -> None:
    row = {"prompt": "p", "response": "by Zoë", "critique": "Right.", "good": ["Zoë"], "poor": []}
    task = PromptsTask()
    style = StyleConfig(critique=False)
    (example,) = make_reward_examples([read_record(row)], task, tokenizer, max_length=2000, style=style)
    assert decode(tokenizer, example.response_ids) == '{"good": ["Zoë"], "poor": []}'
    messages = task.feedback_messages(read_record(row).to_prompt(), "by Zoë", style=style)
    assert decode(tokenizer, example.prompt_ids) == messages[0]["content"]
