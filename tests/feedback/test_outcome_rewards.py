"""Outcome rewards: reward functions as TRL documents them, metrics of feedback functions, the task's measure."""

import asyncio
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LetterTask, letter_prompts
from trainer_bench import job

from t2g.config import PolicyJob
from t2g.data.prompts import make_prompts
from t2g.errors import RunStopped, UserError
from t2g.feedback import outcome_rewards
from t2g.feedback.outcome_rewards import OutcomeRewards, read_rewards
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.feedback.sources.user_function import FunctionFailed
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import Prompt, Rollout, SpanFeedback

TEXTS = ("<think>\nit is 4\n</think>\n4", "5")
RECORDS = [
    {"id": "text", "prompt": "2 + 2?", "ground_truth": "4"},
    {"id": "chat", "messages": [{"role": "user", "content": "2 + 2?"}], "level": 3},
    {"id": "trl", "prompt": [{"role": "user", "content": "2 + 2?"}], "prompts": "no column: TRL passes its own"},
]


def make_samples(prompt: Prompt, texts: tuple[str, ...] = TEXTS, **feedback: Any) -> list[tuple[Rollout, SpanFeedback]]:
    judged = replace(make_feedback("c", [], [], "", source="program", version="v"), **feedback)
    samples = []
    for i, text in enumerate(texts):
        ids = np.arange(len(text), dtype=np.int32)
        logprobs = np.zeros(len(text), np.float32)
        rollout = Rollout(
            prompt_id=prompt.prompt_id, sample_index=i, prompt_ids=np.array([1], np.int32), response_ids=ids,
            rollout_logprobs=logprobs, response_text=text, finish_reason="stop",
            policy_versions=((0, len(text), 0),),
        )  # fmt: skip
        samples.append((rollout, judged))
    return samples


def paying(*sources: str, tmp_path: Path = Path("/nowhere"), **feedback: Any) -> PolicyJob:
    config = job(outcome_rewards=[{"source": source} for source in sources])
    values = config.model_dump(mode="json") | {"run": {"root": str(tmp_path)}}
    return PolicyJob.model_validate(values | {"feedback": {"source": "pkg:judge"} | feedback})


def score(
    *sources: str, number: int = 0, samples: Callable[[Prompt], Any] = make_samples, tmp_path: Path = Path("/nowhere"),
    **feedback: Any,
) -> list[SpanFeedback]:  # fmt: skip
    prompts = make_prompts(RECORDS, PromptsTask(), None, 0)
    prompt = prompts[number]
    rewards = OutcomeRewards(paying(*sources, tmp_path=tmp_path, **feedback), PromptsTask(), prompts)
    return asyncio.run(rewards.score(prompt, samples(prompt)))


SEEN: list[dict[str, Any]] = []


def recording(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    SEEN.append({"prompts": prompts, "completions": completions, **kwargs})
    return [0.5] * len(prompts)


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_a_function_gets_what_trl_passes(number: int) -> None:
    """TRL's own code is the oracle; its trainer_state and its two loggers belong to its trainer."""
    from trl import GRPOTrainer

    SEEN.clear()
    assert [feedback.outcomes for feedback in score(f"{__name__}:recording", number=number)] == [
        {f"{__name__}:recording": 0.5}
    ] * 2
    record = {"ground_truth": None, "level": None} | RECORDS[number]
    prompt = record.pop("messages", None) or record.pop("prompt")
    inputs = [{name: value for name, value in record.items() if name not in ("prompt", "prompts")}] * 2
    is_chat = isinstance(prompt, list)
    completions = [[{"role": "assistant", "content": text}] if is_chat else text for text in TEXTS]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True), environments=None,
        state=SimpleNamespace(global_step=0), args=SimpleNamespace(report_to=[]),
        reward_funcs=[recording], reward_processing_classes=[None], reward_func_names=["recording"],
        _log_completion_extra=None, _log_metric=None, model=SimpleNamespace(training=True),
    )  # fmt: skip
    rewards = GRPOTrainer._calculate_rewards(
        trainer, inputs, [prompt] * 2, completions, [[*range(len(t))] for t in TEXTS]
    )
    ours, theirs = SEEN
    assert theirs.keys() - ours.keys() == {"trainer_state", "log_extra", "log_metric", "id"}, "guide 11 names them"
    assert ours == {name: theirs[name] for name in ours}
    assert rewards.tolist() == [[0.5], [0.5]]


def boxed(completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
    """In the style of TRL's documentation: a text is searched, a column is a list."""
    matches = [re.search(r"(\d)$", completion) for completion in completions]
    return [1.0 if match and match[1] == truth else 0.0 for match, truth in zip(matches, ground_truth, strict=True)]


def only_levels(completions: list[Any], level: list[int | None]) -> list[float | None]:
    return [
        None if of is None else float(of * len(completion)) for completion, of in zip(completions, level, strict=True)
    ]


async def later(completions: list[Any], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(bool(completion)) for completion in completions]


def test_functions_in_the_style_of_trls_documentation_run_unchanged() -> None:
    from trl.rewards import get_repetition_penalty_reward

    names = [f"{__name__}:{name}" for name in ("boxed", "only_levels", "later", "repetition")]
    globals()["repetition"] = get_repetition_penalty_reward(ngram_size=1, max_penalty=-1.0)
    text = score(*names, samples=lambda prompt: make_samples(prompt, ("4", "45", "5")))
    expected = [[1, None, 1, 0], [0, None, 1, 0], [0, None, 1, 0]]
    for feedback, rewards in zip(text, expected, strict=True):
        assert [feedback.outcomes.get(name) for name in names] == rewards
    levels, think = score(names[1], "trl.rewards:think_format_reward", number=1)[0].outcomes.items()
    assert levels == (names[1], 3.0)
    assert think == ("trl.rewards:think_format_reward", 1.0)
    assert score("trl.rewards:think_format_reward", number=1)[1].outcomes == {"trl.rewards:think_format_reward": 0.0}


NAN = math.nan
INF = math.inf


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1.0], r"returned 1 numbers for 2 completions; it needs to return one for each"),
        ([1.0] * 9, r"returned more than 2 numbers for 2 completions"),
        ([1.0, NAN], r"returned nan among its numbers; it needs finite numbers, or None"),
        ([-INF, 1.0], r"returned -inf among its numbers"),
        ([10**400, 1.0], r"returned 10000"),
        ([1e39, 1.0], r"returned 1e\+39 among its numbers"),
        (["1", "2"], r"returned '1' among its numbers"),
        ([[1.0], [2.0]], r"returned \[1.0\] among its numbers"),
        ([1j, 2.0], r"returned 1j among its numbers"),
        ("12", r"returned '12'; it needs to return a list of numbers"),
        ({"a": 1.0, "b": 2.0}, r"returned \{'a': 1.0, 'b': 2.0\}; it needs to return a list"),
        (None, r"returned None; it needs to return a list of numbers"),
        (0.5, r"returned 0.5; it needs to return a list of numbers"),
    ],
)
def test_another_answer_than_a_list_of_finite_numbers_is_named(answer: Any, reason: str) -> None:
    with pytest.raises(FunctionFailed, match=f"^{reason}"):
        read_rewards(answer, count=2)


def test_numbers_of_any_library_are_read() -> None:
    for values in ((1, True), np.array([1, 1]), torch.ones(2), [np.float32(1), torch.tensor(1.0)], iter([1.0, 1])):
        numbers = read_rewards(values, count=2)
        assert numbers == [1.0, 1.0]
        assert all(type(number) is float for number in numbers)
    assert read_rewards([None, 2], count=2) == [None, 2.0]
    assert read_rewards([], count=0) == []


def too_few(completions: list[str]) -> list[float]:
    return [1.0]


def raising(completions: list[str]) -> list[float]:
    raise KeyError("gone")


def hanging(completions: list[str]) -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("too_few", "returned 1 numbers for 2 completions"),
        ("raising", "raised KeyError: 'gone' (traceback in"),
        ("hanging", "gave no answer within feedback.timeout_s=3"),
    ],
)
def test_a_function_that_fails_makes_the_feedback_of_its_group_failed(
    name: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feedbacks = score(f"{__name__}:{name}", f"{__name__}:later", tmp_path=tmp_path, timeout_s=3)
    for feedback in feedbacks:
        assert feedback.status == "failed" and feedback.critique == "c"
        assert feedback.reason.startswith(f"the reward function {__name__}:{name} {reason}")
        assert feedback.outcomes == {f"{__name__}:later": 1.0}
    assert len(caplog.messages) == 1
    assert "objective.outcome_rewards: the reward function" in caplog.messages[0]
    assert (tmp_path / "run" / "feedback.log").exists() == (name == "raising")


def test_functions_that_hang_stop_the_run() -> None:
    prompts = make_prompts(RECORDS, PromptsTask(), None, 0)
    rewards = OutcomeRewards(paying(f"{__name__}:hanging", timeout_s=0.05), PromptsTask(), prompts)

    async def step() -> None:
        for prompt in prompts:
            await rewards.score(prompt, make_samples(prompt))

    with pytest.raises(
        RunStopped, match=r"^objective.outcome_rewards: the reward function \S+:hanging gave no answer 3"
    ):
        asyncio.run(step())


def test_a_metric_of_the_feedback_function_is_paid_and_a_missing_one_is_named() -> None:
    def samples(prompt: Prompt) -> Any:
        pairs = make_samples(prompt, ("a", "b", "c", "d"), metrics={"tone": 0.25, "facts/right": 2.0})
        pairs[1] = (replace(pairs[1][0], answer_start=None), replace(pairs[1][1], metrics={}))
        pairs[2] = (pairs[2][0], make_failed_feedback("failed", source="s", version="v", reason="no answer"))
        pairs[3] = (pairs[3][0], replace(pairs[3][1], metrics={"tune": 1.0}))
        return pairs

    first, unanswered, failed, other = score("metric:tone", samples=samples)
    assert (first.outcomes, first.status) == ({"metric:tone": 0.25}, "empty")
    assert (unanswered.outcomes, unanswered.status) == ({}, "empty"), "it was not judged, and is trained on"
    assert (failed.outcomes, failed.reason) == ({}, "no answer")
    assert (other.outcomes, other.status) == ({}, "failed")
    assert other.reason == "objective.outcome_rewards pays metric:tone, and the feedback has tune"


def test_the_task_measures_the_answers_that_are_trained_on() -> None:
    task = LetterTask()
    prompt = letter_prompts(1)[0]
    pairs = make_samples(prompt, ("aab", "ab", "a"))
    pairs[1] = (replace(pairs[1][0], answer_start=None), pairs[1][1])
    pairs[2] = (pairs[2][0], replace(pairs[2][1], status="failed"))
    rewards = OutcomeRewards(paying("task"), task, [prompt])
    assert [f.outcomes for f in asyncio.run(rewards.score(prompt, pairs))] == [{"task": 0.5}, {}, {}]
    assert len(task.sandboxes) == 1


def test_programs_that_are_measured_keep_no_call_of_the_learner_waiting() -> None:
    """The learner is called in asyncio's threads: here there is one, and it is taken."""
    task = LetterTask()
    prompt = letter_prompts(1)[0]
    rewards = OutcomeRewards(paying("task"), task, [prompt])
    may_end = threading.Event()

    async def score_meanwhile() -> list[SpanFeedback]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        learner = asyncio.ensure_future(asyncio.to_thread(may_end.wait, 20))
        try:
            async with asyncio.timeout(10):
                return await rewards.score(prompt, make_samples(prompt, ("aab",)))
        finally:
            may_end.set()
            await learner

    assert [feedback.outcomes for feedback in asyncio.run(score_meanwhile())] == [{"task": 0.5}]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "measure raised ZeroDivisionError: division by zero"),
        ("hangs", "measure did not return within 0.2 s"),
    ],
)
def test_a_measure_of_a_user_that_fails_stops_the_run_with_a_reason(
    how: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome_rewards, "MEASURE_TIMEOUT_S", 0.2)
    task = LetterTask()
    may_end = threading.Event()

    def fail(*_: Any, **__: Any) -> Any:
        return 1 / 0 if how == "raises" else may_end.wait(20)

    task.measure = fail
    prompt = letter_prompts(1)[0]
    rewards = OutcomeRewards(paying("task"), task, [prompt])
    with pytest.raises(RunStopped, match=f"task letters: {reason}, for prompt {prompt.prompt_id}"):
        asyncio.run(rewards.score(prompt, make_samples(prompt, ("aab",))))
    may_end.set()


@pytest.mark.parametrize("span_coef", [0.0, 1.0])
def test_a_response_to_which_nothing_applies_is_left_out_unless_its_spans_are_paid(span_coef: float) -> None:
    """The second response has no answer, and pays the truncation penalty."""
    prompts = make_prompts(RECORDS, PromptsTask(), None, 0)
    samples = make_samples(prompts[0])
    samples[1] = (replace(samples[1][0], answer_start=None), samples[1][1])
    config = paying(f"{__name__}:only_levels")
    objective = config.objective.model_copy(update={"span_coef": span_coef})
    rewards = OutcomeRewards(config.model_copy(update={"objective": objective}), PromptsTask(), prompts)
    statuses = [f.status for number in (0, 1) for f in asyncio.run(rewards.score(prompts[number], samples))]
    assert statuses == ["failed" if span_coef == 0 else "empty", "empty", "empty", "empty"]


def needs_more(completions: list[str], trainer_state: Any) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("source", "feedback", "reason"),
    [
        (
            "no_such_module:f",
            {},
            r"objective.outcome_rewards: no_such_module:f cannot be imported: ModuleNotFoundError",
        ),
        (f"{__name__}:no_such", {}, "cannot be imported: AttributeError"),
        (f"{__name__}:RECORDS", {}, "has the type list; it needs to be a function"),
        (
            f"{__name__}:needs_more",
            {},
            r"cannot be called with prompts, completions, completion_ids and the records' fields, but is "
            r"needs_more\(completions.*missing a required argument: 'trainer_state'",
        ),
        ("builtins:dict", {}, "but is dict: no signature found"),
        ("metric:tone", {"source": "llm", "llm": {"model": "m"}}, "metric:tone is a number of a feedback function"),
        ("task", {}, "source task pays the task's measure, and task prompts has none"),
    ],
)
def test_what_cannot_be_paid_is_refused_before_the_run(source: str, feedback: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        score(source, **feedback)


def test_every_prompt_needs_a_measure_and_none_is_measured() -> None:
    task = LetterTask()
    prompts = letter_prompts(4)
    OutcomeRewards(paying("task"), task, prompts)
    task.unmeasured = {"p2", "p3"}
    OutcomeRewards(paying(), task, prompts)
    with pytest.raises(UserError, match=r"pays share_a, and 2 of 4 prompts of data.path .* prompt p2;"):
        OutcomeRewards(paying("task"), task, prompts)
    assert task.sandboxes == [], "no response was measured"


@pytest.mark.parametrize(
    "feedback",
    [
        {"concurrency": 3},
        {
            "source": "reward_model",
            "sources": {"a": {"source": "m:f", "concurrency": 3}, "b": {"source": "m:g", "concurrency": 1}},
        },
    ],
)
def test_as_many_groups_are_scored_at_once_as_feedback_allows(feedback: dict[str, Any]) -> None:
    RUNNING.clear()
    MOST.clear()
    prompts = make_prompts([{"prompt": str(i)} for i in range(9)], PromptsTask(), None, 0)
    rewards = OutcomeRewards(paying(f"{__name__}:counting", **feedback), PromptsTask(), prompts)

    async def score_all() -> None:
        await asyncio.gather(*(rewards.score(prompt, make_samples(prompt)) for prompt in prompts))

    asyncio.run(score_all())
    assert max(MOST) == 3 and len(MOST) == 9, "one call for each group"


RUNNING: list[int] = []
MOST: list[int] = []


async def counting(completions: list[str]) -> list[float]:
    RUNNING.append(1)
    await asyncio.sleep(0.02)
    MOST.append(len(RUNNING))
    RUNNING.pop()
    return [0.0] * len(completions)
