"""Workers without an engine: they answer as real ones do, from a random generator, within milliseconds of CPU.

They start without torch and transformers, whose import takes longer than the rest of a test.
Where a stub takes part in a weight sync it takes the bytes and says nothing of what they compute: whoever uses it sets
learner.probe_tolerance so high that the probe accepts any number.
"""

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
from tokenizers import Tokenizer

from actors.fleet.meter import EngineStats
from actors.weights.buckets import Bucket
from t2g.environments import Reply
from t2g.feedback.parse import make_feedback
from t2g.interfaces import Sampling
from t2g.types import Prompt, Rollout, SpanFeedback

VOCABULARY = 100
LENGTH = 6
WORK_S = 0.05  # of one request
BREAK_SYNC = "break-sync"
SLOW = "slow"
SLOW_S = 3.0
SLOW_SYNC = "slow-sync"
PHASE = "phase"
SAMPLED_ON = "sampled-on-"
Phase = Literal["generating", "generated", "opened", "loading", "loaded"]


class Again:
    """An environment that asks for one turn more."""

    async def reply(self, prompt: Prompt, messages: Any) -> Reply:
        await asyncio.sleep(WORK_S)
        return Reply("again")


def count_distinct_characters(completions: list[str], **columns: object) -> list[float]:
    """Return the number of different characters of each response: a reward function as in TRL."""
    return [float(len(set(str(completion)))) for completion in completions]


class StubRolloutWorker:
    """The methods of `RolloutWorker`.

    Files in the model's folder change them:
        BREAK_SYNC: The first worker that sees it deletes it, and fails half way through a weight sync.
        SLOW: A request takes SLOW_S.
        SLOW_SYNC: The first bucket of a sync takes SLOW_S. Workers write their phase and version into PHASE, and their
            host's name into that of a file SAMPLED_ON*.
    """

    def __init__(
        self, model: str, config: Any, seed: int, revision: str | None = None, transport: str = "store"
    ) -> None:
        words = Tokenizer.from_file(f"{model}/tokenizer.json")
        text_by_id = {number: words.id_to_token(number) for number in range(VOCABULARY)}
        self._letters = {number: text for number, text in text_by_id.items() if len(text) == 1 and text.isascii()}
        self._folder = Path(model)
        self._version = 0
        self._opened = -1
        self._round = ""
        self._received = 0
        self._running = 0
        self._paused = asyncio.Event()
        self._paused.set()

    async def start(self) -> int:
        return VOCABULARY

    async def check_health(self) -> None: ...

    async def measure(self) -> EngineStats:
        return EngineStats()

    async def sample(self, prompt_id: str, prompt_ids: np.ndarray, sampling: Sampling, index: int) -> Rollout:
        self._running += 1
        self._write_phase("generating")
        is_slow = (self._folder / SLOW).exists()
        await asyncio.sleep(SLOW_S if is_slow else WORK_S)
        await self._paused.wait()
        rng = np.random.default_rng([sampling.seed, index, *prompt_id.encode()])
        ids = rng.choice([*self._letters], LENGTH).astype(np.int32)
        text = "".join(self._letters[int(number)] for number in ids)
        self._running -= 1
        if not self._running:
            self._write_phase("generated")
        return Rollout(
            prompt_id=prompt_id,
            sample_index=index,
            prompt_ids=prompt_ids,
            response_ids=ids,
            rollout_logprobs=np.full(LENGTH, -np.log(VOCABULARY), np.float32),
            response_text=text,
            finish_reason="stop",
            policy_versions=((0, LENGTH, self._version),),
        )

    async def open_update(self, round_id: str, version: int, dtype: str, shapes: Any) -> None:
        self._paused.clear()
        self._round = round_id
        self._opened = version
        self._received = 0
        self._write_phase("opened")

    async def load_bucket(self, round_id: str, bucket: Bucket) -> dict[str, float]:
        started = time.monotonic()
        if round_id != self._round:
            raise ValueError("a bucket of another round")
        self._received += 1
        if self._received == 1 and (self._folder / SLOW_SYNC).exists():
            self._write_phase("loading")
            await asyncio.sleep(SLOW_S)
        if self._received == 2 and taken(self._folder / BREAK_SYNC):
            raise ValueError("half a sync, as asked for")
        return {"load": time.monotonic() - started}

    async def close_update(self, round_id: str) -> None:
        if round_id != self._round:
            raise ValueError("the end of another round")
        self._version = self._opened
        self._write_phase("loaded")
        self._paused.set()

    def _write_phase(self, phase: Phase) -> None:
        if (self._folder / SLOW_SYNC).exists():
            own_file = self._folder / f"{PHASE}-{socket.gethostname()}-{os.getpid()}"
            own_file.write_text(describe_phase(phase, self._version))
            own_file.replace(self._folder / PHASE)
            (self._folder / f"{SAMPLED_ON}{socket.gethostname()}").touch()

    async def compute_logprobs(self, ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(ids) - 1, np.float32)


class StubRewardWorker:
    """The methods of `RewardWorker`: the first character of a response is good, the last one is poor."""

    def __init__(self, config: Any, task: Any, seed: int, version: str) -> None:
        self._version = version

    async def start(self) -> None: ...

    async def check_health(self) -> None: ...

    async def measure(self) -> EngineStats:
        return EngineStats()

    async def judge(
        self, prompt: Prompt, response_text: str, *, critique: str | None = None, guided: bool = True
    ) -> SpanFeedback:
        await asyncio.sleep(WORK_S)
        good = [(response_text[:1], 1)]
        poor = [(response_text[-1:], response_text.count(response_text[-1:]))]
        if not response_text.strip():
            good = []
            poor = []
        return make_feedback(
            "the beginning helps, the end does not", good, poor, response_text,
            source="reward_model", version=self._version,
        )  # fmt: skip


def describe_phase(phase: Phase, version: int) -> str:
    """Return what PHASE holds."""
    return f"{phase} {version}"


def taken(flag: Path) -> bool:
    """Whether it was there and is gone by our hand, and no other worker's."""
    try:
        flag.unlink()
    except FileNotFoundError:
        return False
    return True


StubRollout = ray.remote(StubRolloutWorker)
StubReward = ray.remote(StubRewardWorker)
