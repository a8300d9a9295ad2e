"""The producer: responses are judged as soon as each is sampled, and each once."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fakes import FakeFeedback

from t2g.config import PolicyJob
from t2g.errors import SamplingFailed
from t2g.feedback.parse import make_feedback
from t2g.interfaces import Sampling
from t2g.loop.producer import Producer
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
        self._feedback, self._fails = feedback, fails

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


def test_a_response_is_judged_before_the_others_are_sampled_and_once(tmp_path: Path) -> None:
    step, judged = take_step(tmp_path, fails=False)
    assert judged == ["response 1", "response 0"]
    assert [(r.sample_index, r.response_text, f.usable) for _, r, f in step.pairs] == [
        (0, "response 0", True), (1, "response 1", True),
    ]  # fmt: skip


def test_a_prompt_whose_sampling_fails_has_no_samples(tmp_path: Path) -> None:
    step, judged = take_step(tmp_path, fails=True)
    assert (step.pairs, judged) == ((), ["response 1"])
    assert step.unsampled == {"p": "prompt p: no answer"}
