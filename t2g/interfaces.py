"""The four seams of the loop: `t2g.loop.trainer` is written against these, fleets of Ray actors and fakes are them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from t2g.types import Prompt, Rollout, SpanFeedback, TokenStats, TrainBatch, UpdateResult, WeightSyncResult


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the policy is sampled. top_p 1, top_k off, min_p 0 and no penalties always: PPO trains what it samples."""

    num_samples: int  # responses per prompt
    temperature: float
    max_new_tokens: int
    seed: int  # sample i of a prompt uses a seed made of (seed, prompt_id, i)


class RolloutSource(Protocol):
    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        """All `num_samples` responses to one prompt, in order of sample_index."""


class FeedbackSource(Protocol):
    """The defaults are of those that derive from it."""

    name: str  # goes into SpanFeedback.source
    fleet: Any = None  # the engines behind it, for whoever scales them; None: there are none of our own

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Critique and spans of one response. Never raises for one bad answer: status says what happened."""


class Aligner(Protocol):
    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """The spans that a critique by somebody else speaks of, with that critique. Else as `FeedbackSource.judge`."""


class Learner(Protocol):
    def forward(self, rollouts: Sequence[Rollout]) -> list[TokenStats]:
        """Old logprobs, reference logprobs, values (0 without a critic) and entropy, in the order of `rollouts`.

        Old logprobs and entropy are 0 where nothing needs them before the update: its result then says them.
        """

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Every optimizer step of the batch; policy_version goes up by one, in the critic's warm-up as well."""

    def save(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Trained weights, optimizers, schedules and RNG of every rank, into an existing empty folder.

        `t2g.files.describe_file` of the files that were hashed by who wrote them, by their names in the folder.
        """

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """The policy as a Hugging Face folder in safetensors, tokenizer included; adapters merged, and in `adapter`."""


class WeightSync(Protocol):
    async def push(self, policy_version: int) -> WeightSyncResult:
        """The learner's weights into every rollout worker, verified by names and by a scored probe.

        The caller makes no other call of the learner meanwhile.
        """


Turn = Literal["engines", "learner"]


class Turns(Protocol):
    async def take(self, turn: Turn) -> None:
        """The GPUs are theirs from now on, until the others take their turn. Does nothing where they have it."""
