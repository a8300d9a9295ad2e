"""The interfaces of the training loop: fleets of Ray actors implement them, and so do the fakes of the tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from t2g.types import (
    Prompt,
    Rollout,
    SpanFeedback,
    TeacherQuery,
    TeacherStats,
    TokenStats,
    TrainBatch,
    UpdateResult,
    WeightSyncResult,
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters. top_p is 1, top_k and min_p are off, and penalties are 0: PPO trains what it samples."""

    num_samples: int  # responses per prompt
    temperature: float
    max_new_tokens: int
    seed: int  # sample i of a prompt uses a seed made of (seed, prompt_id, i)


class RolloutSource(Protocol):
    async def sample(
        self, prompt: Prompt, sampling: Sampling, on_rollout: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """Return `num_samples` responses to one prompt, in order of sample_index.

        Args:
            on_rollout: May be called with a response before the others are there, once it is final.
        """


class FeedbackSource(Protocol):
    """Source of critiques and spans. The defaults are for classes that derive from it."""

    name: str  # written to SpanFeedback.source
    fleet: Any = None  # the source's own engines, for scaling; None: it has none
    judgement_cache_key: str = ""  # version of recorded judgements, see `t2g.runs.judgements`; "": none is recorded

    # Whether each turn of a conversation is judged alone, with the reply to it in the payload; else the transcript is.
    judges_turns: bool = False

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Return critique and spans of one response. A bad answer does not raise: it is in the status."""


class Aligner(Protocol):
    fleet: Any = None  # as in `FeedbackSource`
    judgement_cache_key: str = ""

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """Return the spans that a given critique is about, with that critique; else as `FeedbackSource.judge`."""


class Learner(Protocol):
    def forward(self, rollouts: Sequence[Rollout]) -> list[TokenStats]:
        """Return old and reference logprobs, values (0 without a critic) and entropy, in the order of `rollouts`.

        Old logprobs and entropy are 0 where nothing needs them before the update; `UpdateResult.stats` has them then.
        """

    def score_teacher(self, queries: Sequence[TeacherQuery]) -> list[TeacherStats]:
        """Return the frozen reference's log-probabilities after the teacher's prompts, in the order of `queries`."""

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Run every optimizer step of the batch; policy_version grows by one, also in the critic's warm-up."""

    def save(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Write trained weights, optimizers, schedules and RNG of every rank into an existing empty folder.

        Returns:
            `t2g.files.describe_file` of each file that its writer has hashed, by its name in the folder.
        """

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder with tokenizer; adapters are merged, and also kept in `adapter`."""


class WeightSync(Protocol):
    async def push(self, policy_version: int) -> WeightSyncResult:
        """Push the learner's weights to every rollout worker; names and a scored probe verify them.

        Returns once at least one worker has verified them. The others get no requests until they have.

        The caller must not call the learner meanwhile.
        """


GpuUser = Literal["engines", "learner"]


class GpuTimeSharing(Protocol):
    async def switch_to(self, user: GpuUser) -> None:
        """Give the GPUs to the engines or to the learner; no effect if they have them already."""
