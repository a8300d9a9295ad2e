"""A request that vLLM ends for another reason than the model's own is sampled again by another engine."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_ray import FakeRay
from fakes import letter_tokenizer

from actors.engines.rollout import RolloutFleet, RolloutWorker
from t2g.config import RolloutConfig, WorkersConfig
from t2g.errors import SamplingFailed
from t2g.interfaces import Sampling
from t2g.types import Prompt, Rollout

CONFIG = RolloutConfig(workers=WorkersConfig(initial=2, min=1), cpus=0.1, memory_gib=0.1)
SAMPLING = Sampling(num_samples=2, temperature=1.0, max_new_tokens=3, seed=1)


class FakeLLM:
    """vLLM's AsyncLLM: the prompt's first token is the index of a script, one finish reason for each request."""

    def __init__(self, scripts: list[list[str]], attempts: Counter[int]) -> None:
        self.scripts = scripts
        self.attempts = attempts

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any) -> AsyncIterator[Any]:
        (number,) = prompt["prompt_token_ids"]
        script = self.scripts[number]
        attempt = self.attempts[number]
        self.attempts[number] += 1
        reason = script[min(attempt, len(script) - 1)]
        if reason == "raise":
            raise Unnamed from ModuleNotFoundError("No module named 'guide'")
        whole = reason in ("stop", "length")
        logprobs = SimpleNamespace(logprobs=[-1.0]) if whole else None  # vLLM sends none with an error
        version = SimpleNamespace(start=0, end=1, version="default")
        output = SimpleNamespace(
            token_ids=[5] if whole else [], logprobs=logprobs, finish_reason=reason, weight_versions=[version]
        )
        yield SimpleNamespace(outputs=[output])


class Unnamed(Exception):
    """As vLLM's EngineGenerateError: without a text, and with a cause."""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2), StructuredOutputsParams=dict)
    modules = {
        "vllm": SimpleNamespace(SamplingParams=dict, TokensPrompt=dict),
        "vllm.sampling_params": kinds,
        "vllm.v1.engine.exceptions": SimpleNamespace(EngineDeadError=SystemError, EngineGenerateError=Unnamed),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    fake = FakeRay()
    fake.take_place(monkeypatch)
    yield fake
    fake.stop()


def sample(ray: FakeRay, folder: Path, *scripts: list[str]) -> tuple[list[list[Rollout] | str], Counter[int]]:
    """Return per script the responses, or what SamplingFailed says; and the number of requests that vLLM was sent."""
    tokenizer = letter_tokenizer(folder)
    attempts = Counter[int]()

    class Worker(RolloutWorker):
        async def start(self) -> int:
            self._tokenizer = tokenizer
            self._stop_ids = []
            self._llm = FakeLLM([*scripts], attempts)
            return len(tokenizer)

    kind = type("ScriptedFleet", (RolloutFleet,), {"actor": ray.actor(Worker)})
    fleet = kind(str(folder), CONFIG, seed=1, placement_timeout_s=20)
    fleet.wait_ready()

    async def responses(number: int) -> list[Rollout] | str:
        prompt = Prompt(prompt_id=f"p{number}", prompt_ids=np.array([number], np.int32), prompt_text="", task="t")
        try:
            return await fleet.sample(prompt, SAMPLING)
        except SamplingFailed as error:
            return str(error)

    async def run() -> list[list[Rollout] | str]:
        return await asyncio.gather(*map(responses, range(len(scripts))))

    return asyncio.run(run()), attempts


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_an_interrupted_request_is_sampled_again_and_a_whole_one_is_not(
    ray: FakeRay, tmp_path: Path, reason: str
) -> None:
    (again, whole), attempts = sample(ray, tmp_path, [reason, "stop", "length"], ["length", "stop"])
    assert [(r.sample_index, r.finish_reason, len(r.response_ids)) for r in again] == [(0, "length", 1), (1, "stop", 1)]
    assert [r.finish_reason for r in whole] == ["length", "stop"]
    assert attempts == {0: 3, 1: 2}


def test_a_request_that_always_fails_ends_after_three_tries_and_harms_no_other(ray: FakeRay, tmp_path: Path) -> None:
    (lost, sampled), attempts = sample(ray, tmp_path, ["repetition"], ["stop"])
    assert str(lost).startswith("prompt p0: ")
    assert str(lost).count("finish_reason=repetition") == 3
    assert len(sampled) == 2
    assert attempts == {0: 3 * SAMPLING.num_samples, 1: 2}


def test_a_request_that_vllm_cannot_take_fails_with_the_cause(ray: FakeRay, tmp_path: Path) -> None:
    (lost,), _ = sample(ray, tmp_path, ["raise"])
    assert str(lost).count("ModuleNotFoundError: No module named 'guide'") == 3
