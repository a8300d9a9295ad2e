"""The producer: responses are judged as soon as each is sampled, and each once."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeFeedback

from t2g.config import FeedbackConfig, PolicyJob
from t2g.errors import SamplingFailed
from t2g.feedback.parse import make_feedback
from t2g.feedback.sources.make import make_local_source
from t2g.interfaces import Sampling
from t2g.loop.producer import Producer
from t2g.loop.sampling import JudgedStep, make_dropped_records
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import Prompt, Rollout, SpanFeedback

PROMPT = Prompt(prompt_id="p", prompt_ids=np.array([1], np.int32), prompt_text="?", task="prompts", payload={})


def rollout(index: int) -> Rollout:
    return Rollout(
        prompt_id="p", sample_index=index, prompt_ids=PROMPT.prompt_ids, response_ids=np.array([2], np.int32),
        rollout_logprobs=np.zeros(1, np.float32), response_text=f"response {index}", finish_reason="stop",
        policy_versions=((0, 1, 0),),
    )  # fmt: skip


class RecordingFeedback(FakeFeedback):
    def __init__(self) -> None:
        super().__init__()
        self.judged: list[str] = []
        self.has_judged = asyncio.Event()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.judged.append(response_text)
        self.has_judged.set()
        return make_feedback("", [], [], response_text, source=self.name, version="fake")


class StreamingRollouts:
    """Samples the second response only after the first has been judged."""

    def __init__(self, feedback: RecordingFeedback, fails: bool) -> None:
        self._feedback = feedback
        self._fails = fails

    async def sample(
        self, prompt: Prompt, sampling: Sampling, on_rollout: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        assert on_rollout is not None
        on_rollout(rollout(1))
        await asyncio.wait_for(self._feedback.has_judged.wait(), 10)
        if self._fails:
            raise SamplingFailed("prompt p: no answer")
        return [rollout(0), rollout(1)]


def take_step(tmp_path: Path, *, fails: bool) -> tuple[Any, list[str]]:
    config = PolicyJob(
        model={"policy": "m"}, data={"path": "d"}, feedback={"source": "a:b"},
        rollout={"prompts_per_step": 1, "samples_per_prompt": 2},
    )  # fmt: skip

    async def run() -> tuple[Any, list[str]]:
        feedback = RecordingFeedback()
        async with Producer(config, [PROMPT], StreamingRollouts(feedback, fails), feedback) as producer:
            producer.admit(1)
            return await producer.take(1, lambda: False), feedback.judged

    return asyncio.run(run())


class HoldingFeedback(RecordingFeedback):
    """Feedback that waits for `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.release = asyncio.Event()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        judged = await super().judge(prompt, response_text)
        await asyncio.wait_for(self.release.wait(), 10)
        return judged


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_is_awaited_tells_whether_it_samples_or_judges(fails: bool) -> None:
    config = PolicyJob(
        model={"policy": "m"}, data={"path": "d"}, feedback={"source": "a:b"},
        rollout={"prompts_per_step": 1, "samples_per_prompt": 2},
    )  # fmt: skip
    phases: list[str] = []

    async def run() -> None:
        feedback = HoldingFeedback()
        inputs = [PROMPT], StreamingRollouts(feedback, fails), feedback
        async with Producer(config, *inputs, on_phase=phases.append) as producer:
            producer.admit(1)
            producer.admit(2)
            first = asyncio.ensure_future(producer.take(1, lambda: False))
            await asyncio.wait_for(feedback.has_judged.wait(), 10)
            await asyncio.sleep(0.05)
            assert phases == ["sampling", "feedback"]
            feedback.release.set()
            await first
            await asyncio.sleep(0.05)
            await producer.take(2, lambda: False)

    asyncio.run(run())
    assert phases == ["sampling", "feedback", "feedback"], "the second step was sampled meanwhile"


def test_a_response_is_judged_before_the_others_are_sampled_and_once(tmp_path: Path) -> None:
    step, judged = take_step(tmp_path, fails=False)
    assert judged == ["response 1", "response 0"]
    assert [(r.sample_index, r.response_text, f.usable) for _, r, f in step.responses] == [
        (0, "response 0", True), (1, "response 1", True),
    ]  # fmt: skip


def test_a_prompt_whose_sampling_fails_has_no_samples(tmp_path: Path) -> None:
    step, judged = take_step(tmp_path, fails=True)
    assert (step.responses, judged) == ((), ["response 1"])
    assert step.unsampled == {"p": "prompt p: no answer"}


# ------------------------------------------------------------------------------------- feedback functions in a step
# the defaults of rollout.*
NUM_PROMPTS = 16
NUM_SAMPLES = 4
CONCURRENCY = FeedbackConfig(source="a:b").concurrency
BARRIER = threading.Barrier(CONCURRENCY)
ASYNC_BARRIER = asyncio.Barrier(CONCURRENCY)
RELEASE = threading.Event()


def plain_in_step(prompt: str, response: str) -> Any:
    BARRIER.wait(20)  # passes only when so many calls are inside
    return "judged", [], []


async def async_in_step(prompt: str, response: str) -> Any:
    async with asyncio.timeout(20):
        await ASYNC_BARRIER.wait()
    return "judged", [], []


async def blocking_in_step(prompt: str, response: str) -> Any:
    return str(RELEASE.wait(20)), [], []


def often_wrong(prompt: str, response: str) -> Any:
    match response:
        case "response 0":
            return {"critique": "good", "good": ["response"], "poor": [], "metrics": {"tone": 0.5}}
        case "response 1":
            raise OSError("the judge is gone")
        case "response 2":
            return {"critique": "good", "score": 3}
    return threading.Event().wait()


class EqualRollouts:
    async def sample(
        self, prompt: Prompt, sampling: Sampling, on_rollout: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        return [replace(rollout(i), prompt_id=prompt.prompt_id) for i in range(sampling.num_samples)]


def judge_step(name: str, timeout_s: float = 30.0) -> tuple[JudgedStep, int]:
    """Return a step of default size that the function of this module judges, and the beats of the loop meanwhile."""
    config = PolicyJob(
        model={"policy": "m"}, data={"path": "d"}, feedback={"source": f"{__name__}:{name}", "timeout_s": timeout_s}
    )
    RELEASE.clear()
    source = make_local_source(config.feedback, PromptsTask())
    prompts = [replace(PROMPT, prompt_id=f"p{i}") for i in range(NUM_PROMPTS)]
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            if beats == 20:
                RELEASE.set()
            await asyncio.sleep(0.002)

    async def run() -> JudgedStep:
        heartbeat = asyncio.ensure_future(beat())
        async with Producer(config, prompts, EqualRollouts(), source) as producer:
            producer.admit(1)
            step = await producer.take(1, lambda: False)
        heartbeat.cancel()
        return step

    return asyncio.run(run()), beats


@pytest.mark.parametrize("name", ["plain_in_step", "async_in_step"])
def test_a_step_of_default_size_is_judged_in_rounds_of_sixteen_calls(name: str) -> None:
    """64 judgements of 1 s need four rounds, 4 s: each round waits for all its calls."""
    assert CONCURRENCY == 16
    step, _ = judge_step(name)
    assert [feedback.critique for _, _, feedback in step.responses] == ["judged"] * NUM_PROMPTS * NUM_SAMPLES


def test_a_blocking_async_function_delays_no_heartbeat() -> None:
    """The function blocks its loop until the driver's loop has beaten twenty times."""
    step, beats = judge_step("blocking_in_step")
    assert {feedback.critique for _, _, feedback in step.responses} == {"True"}
    assert beats >= 20


def test_wrong_answers_of_some_calls_lose_no_other() -> None:
    step, _ = judge_step("often_wrong", timeout_s=2)
    reasons = [
        "",
        "the feedback function raised OSError: the judge is gone",
        "the feedback function returned an invalid judgement: a dict with the unknown key 'score', no key 'good', "
        "no key 'poor'",
        "the feedback function gave no answer within feedback.timeout_s=2",
    ]
    assert len(step.responses) == NUM_PROMPTS * NUM_SAMPLES
    for _, sampled, feedback in step.responses:
        assert feedback.reason.startswith(reasons[sampled.sample_index])
        assert feedback.usable is (sampled.sample_index == 0) is (feedback.metrics == {"tone": 0.5})
    assert len(make_dropped_records(step)) == NUM_PROMPTS * 3
