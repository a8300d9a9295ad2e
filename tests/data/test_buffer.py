"""What a checkpoint keeps of later steps comes back bit by bit, or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakes import letter_prompts
from hypothesis import given
from hypothesis import strategies as st

from t2g.data.buffer import GROUPS, Group, read_groups, write_groups
from t2g.errors import UserError
from t2g.types import Rollout, Span, SpanFeedback

PROMPTS = {prompt.prompt_id: prompt for prompt in letter_prompts(5)}
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates as well
INT32 = st.integers(-(2**31), 2**31 - 1)
JSON = st.none() | st.booleans() | INT32 | ANY_TEXT

DIGITS = st.integers(0, 9)
spans = st.builds(
    Span,
    start=DIGITS,
    end=st.integers(9, 20),
    label=st.sampled_from([-1, 1]),
    severity=st.integers(1, 3),
    critique_range=st.none() | st.tuples(DIGITS, DIGITS),
)
span_tuples = st.lists(spans, max_size=2).map(tuple)
statuses = st.sampled_from(["ok", "empty", "unparsable", "failed"])
executions = st.dictionaries(ANY_TEXT, JSON, max_size=2)
agreements = st.none() | st.floats(0, 1)
feedbacks = st.builds(
    SpanFeedback,
    critique=ANY_TEXT,
    spans=span_tuples,
    status=statuses,
    source=ANY_TEXT,
    version=ANY_TEXT,
    num_quotes=DIGITS,
    num_located=DIGITS,
    execution=executions,
    agreement=agreements,
    reason=ANY_TEXT,
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    prompt = PROMPTS[draw(st.sampled_from(sorted(PROMPTS)))]
    samples = []
    for index in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(INT32, max_size=4))
        bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(ids), max_size=len(ids)))  # NaNs and all
        logprobs = np.array(bits, np.uint32).view(np.float32)
        text = draw(ANY_TEXT)
        finish_reason = draw(st.sampled_from(["stop", "length"]))
        versions = draw(st.lists(st.tuples(INT32, INT32, INT32), max_size=2))
        rollout = Rollout(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_ids=prompt.prompt_ids,
            response_ids=np.array(ids, np.int32),
            rollout_logprobs=logprobs,
            response_text=text,
            finish_reason=finish_reason,
            policy_versions=tuple(versions),
        )
        samples.append((rollout, draw(feedbacks)))
    return Group(prompt=prompt, samples=tuple(samples))


@given(st.dictionaries(st.integers(1, 9), st.lists(groups(), min_size=1, max_size=2), max_size=2))
def test_every_number_and_text_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, written: dict[int, list[Group]]
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint") / "buffer"
    write_groups(folder, written)
    loaded = read_groups(folder, PROMPTS)
    assert loaded.keys() == written.keys()
    for step, some in written.items():
        for was, now in zip(some, loaded[step], strict=True):
            assert was.prompt is now.prompt
            for (rollout, feedback), (again, feedback_again) in zip(was.samples, now.samples, strict=True):
                assert feedback == feedback_again
                for name, value in vars(rollout).items():
                    other = getattr(again, name)
                    if isinstance(value, np.ndarray):
                        assert value.dtype == other.dtype
                        assert value.tobytes() == other.tobytes()
                    else:
                        assert value == other


def test_no_folder_is_no_buffer(tmp_path: Path) -> None:
    assert read_groups(tmp_path / "buffer", PROMPTS) == {}


def change(folder: Path, key: str, value: object) -> None:
    records = json.loads((folder / GROUPS).read_text())
    (records[0] if key in records[0] else records[0]["samples"][0])[key] = value
    (folder / GROUPS).write_text(json.dumps(records))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / GROUPS).write_text("[{"), "JSONDecodeError"),
        (lambda folder: (folder / GROUPS).write_text('{"a": 1}'), "TypeError"),
        (lambda folder: (folder / GROUPS).unlink(), "FileNotFoundError"),
        (lambda folder: change(folder, "prompt_id", "p9"), "KeyError"),
        (lambda folder: change(folder, "response_ids", "AAAA"), "buffer size must be a multiple"),
        (lambda folder: change(folder, "response_ids", "AAAAAA=="), "not one logprob for each token"),
        (lambda folder: change(folder, "rollout_logprobs", "no base 64"), "base64"),
        (lambda folder: change(folder, "rollout_logprobs", [1.0, 2.0]), "TypeError"),
        (lambda folder: change(folder, "feedback", {"spans": [], "more": 1}), "critique: Field required"),
    ],
)
def test_anything_else_is_one_sentence(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    prompt = PROMPTS["p0"]
    rollout = Rollout(
        prompt_id="p0",
        sample_index=0,
        prompt_ids=prompt.prompt_ids,
        response_ids=np.array([1, 2], np.int32),
        rollout_logprobs=np.array([-1, -2], np.float32),
        response_text="ab",
        finish_reason="stop",
        policy_versions=((0, 2, 1),),
    )
    feedback = SpanFeedback(critique="", spans=(), status="ok", source="program", version="v")
    folder = tmp_path / "buffer"
    write_groups(folder, {4: [Group(prompt=prompt, samples=((rollout, feedback),))]})
    damage(folder)
    with pytest.raises(UserError, match=rf"^{folder} holds no sample buffer of this run \(.*{reason}.*remove the"):
        read_groups(folder, PROMPTS)
