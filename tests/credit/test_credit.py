"""Credit from texts, token ids and judgements: numbers worked by hand, and equality with the loop's own."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LetterTask, letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import ObjectiveConfig, PolicyJob
from t2g.credit import assign_credit
from t2g.errors import UserError
from t2g.feedback import decode
from t2g.feedback.parse import read_judgement
from t2g.loop.scoring import score_response
from t2g.loop.steps import make_train_samples
from t2g.types import Rollout, TokenStats

TEXTS = ("ab", "abc", "cba", "c")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids([*text])


def credit(tokenizer: Any, texts: tuple[str, ...], judgements: list[Any], groups: Any, **objective: Any) -> Any:
    """Return the credit without local credit, unless `objective` says otherwise."""
    config = ObjectiveConfig.model_validate({"local_coef": 0.0} | objective)
    ids = [encode(tokenizer, text) for text in texts]
    return assign_credit(tokenizer, texts, ids, judgements, groups, objective=config)


def test_worked_by_hand(tokenizer: Any) -> None:
    judgements = [("", ["b"], []), ("", ["a"], ["c"]), ("", [], ["cb"]), None]
    assigned = credit(tokenizer, TEXTS, judgements, ["p", "p", "q", "q"], whiten="none")
    # by span: "cb" pays once, at its last token
    assert assigned.token_rewards.tolist() == [[0, 1, 0], [1, 0, -1], [0, -1, 0], [0, 0, 0]]
    # returns 1 1 and 0 -1 -1; "ab" continues with its last return. "c" is not judged, so "cba" is alone
    assert assigned.advantages.tolist() == [[1, 2, 0], [-1, -2, -2], [0, 0, 0], [0, 0, 0]]
    whitened = credit(tokenizer, TEXTS, judgements, ["p", "p", "q", "q"]).advantages
    numbers = torch.tensor([1, 2, -1, -2, -2, 0, 0, 0.0])  # of judged tokens
    scale = numbers.std(correction=0)
    torch.testing.assert_close(whitened[0, :2], (numbers[:2] - numbers.mean()) / scale)
    assert whitened[3].tolist() == [0, 0, 0]
    assert whitened[0, 2] == 0


def test_a_judgement_whose_quotes_are_all_lost_is_none(tokenizer: Any) -> None:
    groups = ["p"] * 3
    lost = credit(tokenizer, TEXTS[:3], [("", ["b"], []), ("", [], ["c"]), ("", [], ["z"])], groups, whiten="none")
    none = credit(tokenizer, TEXTS[:3], [("", ["b"], []), ("", [], ["c"]), None], groups, whiten="none")
    assert lost.advantages.tolist() == none.advantages.tolist()
    assert lost.advantages[2].tolist() == [0, 0, 0]


def test_rules_discount_and_placement_are_the_configs(tokenizer: Any) -> None:
    rule = {"unit": "token", "poor": [-2, -3, -4], "placement": "scalar"}
    assigned = credit(tokenizer, ("abc", "c"), [("", [], ["ab"]), ("", [], [])], [0, 0], rewards=rule, gamma=0.5)
    assert assigned.token_rewards.tolist() == [[0, 0, -4], [0, 0, 0]]
    plain = credit(tokenizer, ("abc", "c"), [("", [], ["c"]), ("", [], [])], [0, 0], gamma=0.5, whiten="none")
    assert plain.advantages.tolist() == [[-0.25, -0.5, -1], [0.25, 0, 0]]


def test_a_confidence_multiplies_and_a_common_one_changes_nothing_on_one_scale(tokenizer: Any) -> None:
    def judge(confidence: float) -> list[Any]:
        unsure = {"quote": "b", "confidence": confidence}
        return [("", [unsure], []), ("", [], [{"quote": "c", "confidence": confidence}]), ("", [], []), None]

    unsure_credit = credit(tokenizer, TEXTS, judge(0.5), [0] * 4, whiten="none")
    assert unsure_credit.token_rewards[:2].tolist() == [[0, 0.5, 0], [0, 0, -0.5]]
    for local_coef in (0.0, 0.3):
        objective = {"whiten": "none", "normalize_criteria": True, "local_coef": local_coef}
        half = credit(tokenizer, TEXTS, judge(0.5), [0] * 4, **objective).advantages
        full = credit(tokenizer, TEXTS, judge(1.0), [0] * 4, **objective).advantages
        torch.testing.assert_close(half, full)
    with pytest.raises(UserError, match=r"response 0: .* confidence: Input should be less than or equal to 1"):
        credit(tokenizer, TEXTS, judge(1.5), [0] * 4)


def test_a_judged_end_of_the_response_has_its_own_characters(tokenizer: Any) -> None:
    """The thinking before it may hold the same text."""
    assigned = assign_credit(tokenizer, ["ab"], [encode(tokenizer, "abcab")], [("", [(0, 1)], [])], [0])
    assert assigned.token_rewards.tolist() == [[0, 0, 0, 1, 0]]


@pytest.mark.parametrize(
    ("text", "judgement", "groups", "reason"),
    [
        ("b", ("", [], []), [0], "response 0: its text 'b' is not in its decoded tokens"),
        ("a", ("", "a", []), [0], "response 0: the good or poor pieces are 'a'"),
        ("a", {}, [0], "response 0: a dict with no key 'critique'"),
        ("a", ("", [], []), [0, 0], r"got \[1, 1, 1, 2\] texts"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tokenizer: Any, text: str, judgement: Any, groups: list[int], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        assign_credit(tokenizer, [text], [encode(tokenizer, "a")], [judgement], groups)


def test_an_empty_batch_and_the_control_are_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"got \[0, 0, 0, 0\] texts"):
        assign_credit(tokenizer, [], [], [], [])
    with pytest.raises(UserError, match=r"objective.rewards.placement is 'shuffled'"):
        credit(tokenizer, ("a",), [("", ["a"], [])], [0], rewards={"placement": "shuffled"})
    with pytest.raises(UserError, match=r"objective\.advantages is 'gae'"):
        credit(tokenizer, ("a",), [("", ["a"], [])], [0], advantages="gae")
    with pytest.raises(UserError, match=r"objective\.advantages is 'unlikely', a control"):
        credit(tokenizer, ("a",), [("", ["a"], [])], [0], advantages="unlikely")


@pytest.mark.parametrize("use", ["distill", "scale"])
def test_a_teacher_is_refused_where_there_is_none(tokenizer: Any, use: str) -> None:
    with pytest.raises(UserError, match=r"objective\.teacher is set, and assign_credit has no teacher"):
        credit(tokenizer, ("a",), [("", ["a"], [])], [0], teacher={"use": use})


@pytest.mark.parametrize(
    ("name", "successor"),
    [("rule", "objective.rewards"), ("normalize", "objective.advantages"), ("whitening", "objective.whiten")],
)
def test_a_replaced_argument_names_its_successor(tokenizer: Any, name: str, successor: str) -> None:
    with pytest.raises(UserError, match=f"no argument {name}: needs {successor}"):
        assign_credit(tokenizer, ["a"], [encode(tokenizer, "a")], [None], [0], **{name: None})


# ----------------------------------------------------------------------------------------------- equality with the loop
def loop_advantages(
    tokenizer: Any, ids: list[list[int]], judgements: list[Any], groups: list[int], **objective: Any
) -> dict[int, np.ndarray]:
    """The advantages that the loop's own scoring and `make_train_samples` give, by the index of a usable judgement."""
    job = PolicyJob.model_validate(
        {"model": {"policy": "m"}, "data": {"path": "d"}, "feedback": {"source": "a:b"}, "objective": objective}
    )
    score = partial(score_response, config=job, task=LetterTask(), tokenizer=tokenizer)
    scored = {}
    for index, (row, judgement, group) in enumerate(zip(ids, judgements, groups, strict=True)):
        length = len(row)
        response_ids = np.array(row, np.int32)
        logprobs = np.zeros(length, np.float32)
        rollout = Rollout(
            prompt_id=str(group), sample_index=index, prompt_ids=np.zeros(1, np.int32), response_ids=response_ids,
            rollout_logprobs=logprobs, response_text=decode(tokenizer, row), finish_reason="length",
            policy_versions=((0, length, 0),),
        )  # fmt: skip
        if judgement is not None:
            feedback = read_judgement(judgement, rollout.response_text, source="program", version="")
            if feedback.usable:
                scored[index] = score(rollout, feedback)
    zeros = [np.zeros(len(s.token_rewards), np.float32) for s in scored.values()]
    stats = [TokenStats(old_logprobs=zero, ref_logprobs=zero, values=zero, entropy=zero) for zero in zeros]
    samples = make_train_samples([*scored.values()], stats, job.objective, kl_coef=0.0, seed=1)
    return {index: sample.advantages for index, sample in zip(scored, samples, strict=True)}


responses = st.text("abc", min_size=1, max_size=6)
unsure = st.builds(dict, quote=st.sampled_from("abc"), confidence=st.sampled_from([0, 0.25, 1]))
pieces = st.lists(st.sampled_from("abc") | unsure, max_size=2)


@given(st.lists(st.tuples(responses, st.none() | st.tuples(st.just(""), pieces, pieces)), min_size=2, max_size=6))
@pytest.mark.parametrize(
    "options",
    [
        {"advantages": "group"},
        {"advantages": "group_normalised"},
        {"local_coef": 0.3, "local_cap": 1.0},
        {"local_coef": 2.0, "local_keeps_sign": True},
        {"values": "span", "lam": 0.8},
        {"values": "sentence", "lam": 0.5},
        {"lam": 0.9},
        {"normalize_criteria": True},
    ],
)
def test_it_is_the_loops_own(tokenizer: Any, options: dict[str, Any], judged: list[tuple[str, Any]]) -> None:
    judged = [*judged, ("abc", ("", ["a"], ["b"]))]  # the loop stops a step without any judgement
    texts, judgements = zip(*judged, strict=True)
    groups = [index // 3 for index in range(len(texts))]
    ids = [encode(tokenizer, text) for text in texts]
    assigned = assign_credit(
        tokenizer,
        texts,
        ids,
        judgements,
        groups,
        objective=ObjectiveConfig.model_validate(options),
        sentence_end=LetterTask.step_pattern,
    )
    expected_by_index = loop_advantages(tokenizer, ids, [*judgements], groups, **options)
    for index, (row, row_ids) in enumerate(zip(assigned.advantages.numpy(), ids, strict=True)):
        expected = expected_by_index.get(index, np.zeros(len(row_ids)))
        np.testing.assert_allclose(row[: len(row_ids)], expected, atol=1e-5)
        assert not row[len(row_ids) :].any()


def test_it_imports_neither_an_engine_nor_a_cluster() -> None:
    code = "import sys, t2g.credit; print(*{'ray', 'vllm', 'deepspeed', 'transformers', 'trl'} & {*sys.modules})"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
