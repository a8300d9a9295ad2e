"""The records that cross a boundary: one frozen record per stage, a new one for each new stage.

Every `[R]` array is aligned with `response_ids`: entry t is about the t-th response token. The shift between a token
and the position that predicts it happens once, in `t2g.algo.logprobs`.

Shape letters: P prompt tokens, R response tokens.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from t2g.config.validation_errors import format_first_error

FeedbackStatus = Literal["ok", "empty", "unparsable", "failed"]
FinishReason = Literal["stop", "length"]
Severity = Annotated[int, Field(strict=True, ge=1, le=3)]
USABLE = ("ok", "empty")
LABELS: dict[str, Literal[-1, 1]] = {"good": 1, "poor": -1}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the policy is asked."""

    prompt_id: str  # unique in a data set
    prompt_text: str  # the user's text, as the feedback source and the report see it
    task: str  # name of the task, as in config
    # [P] int32, chat template applied; none where the policy is not asked
    prompt_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    payload: dict[str, Any] = field(default_factory=dict)  # whatever else the record held: reference, facts, tests


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled response. `response_text` is our own decode of `response_ids`, never the engine's text."""

    prompt_id: str
    sample_index: int  # 0 .. samples per prompt - 1
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32, EOS included when it was sampled
    rollout_logprobs: np.ndarray  # [R] float32, the engine's, of softmax(logits / temperature)
    response_text: str
    finish_reason: FinishReason
    policy_versions: tuple[tuple[int, int, int], ...]  # (start, end, version): tokens [start, end) and their weights

    @property
    def is_truncated(self) -> bool:
        """Whether the response ended at max_new_tokens and not with EOS."""
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a response that the critique calls good or poor."""

    __pydantic_config__: ClassVar = ConfigDict(revalidate_instances="always")  # users' functions make spans, too

    start: int  # half-open character range of response_text
    end: int
    label: Literal[-1, 1]  # +1 good, -1 poor
    severity: Severity = 1
    critique_range: tuple[int, int] | None = None  # characters of the critique that speak of it


@dataclass(frozen=True, kw_only=True)
class SpanFeedback:
    """A critique in words and the spans it speaks of."""

    critique: str
    spans: tuple[Span, ...]
    status: FeedbackStatus
    source: str  # "reward_model", "program", "llm", "human"
    version: str  # what the source was: model folder and prompt template, or import path
    num_quotes: int = 0  # quotes given by the source
    num_located: int = 0  # quotes that stand in the response
    execution: dict[str, Any] = field(default_factory=dict)  # what a program found: {"passed": False, ...}, plain JSON
    agreement: float | None = None  # between several annotators: mean pairwise token F1 of their labels, 0 .. 1
    reason: str = ""  # why the status is failed or unparsable, a sentence

    @property
    def usable(self) -> bool:
        """Whether it says something; the rest is for counting."""
        return self.status in USABLE


_FEEDBACK = TypeAdapter(SpanFeedback)


def read_feedback(record: Any) -> SpanFeedback:
    """What `dataclasses.asdict` of feedback is after JSON. ValueError for anything else."""
    try:
        return _FEEDBACK.validate_python(record)
    except ValidationError as error:
        raise ValueError(f"feedback: {format_first_error(error)}") from None


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """A rollout with its feedback projected onto the sampled tokens."""

    rollout: Rollout
    feedback: SpanFeedback
    token_rewards: np.ndarray  # [R] float32, what the spans pay, by objective.rewards: before placement, weight and KL
    step_ids: np.ndarray  # [R] int32, 0, 1, ...: which sentence, or line of code, token t belongs to
    outcome_reward: float = 0.0  # the task's own measure of the response; 0 where objective.outcome_rewards is 0
    by_token: np.ndarray | None = None  # [R] float32, see `deltas`; none: token_rewards are by token
    truncation_penalty: float = 0.0  # <= 0, paid at the last token of a truncated response

    @property
    def deltas(self) -> np.ndarray:
        """[R] float32, the paper's delta: what the spans that cover a token are worth, whatever unit is paid."""
        return self.token_rewards if self.by_token is None else self.by_token

    @property
    def rewards(self) -> np.ndarray:
        """[R] float32: token_rewards with the truncation penalty at the last token; before placement, weight and KL."""
        rewards = self.token_rewards.copy()
        rewards[-1:] += self.truncation_penalty
        return rewards


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """The learner's view of one rollout before the update. Of `forward`, 0 for what `UpdateResult.stats` will say."""

    old_logprobs: np.ndarray  # [R] float32, policy that will be updated
    ref_logprobs: np.ndarray  # [R] float32, frozen reference
    values: np.ndarray  # [R] float32, critic's value of the state before token t; 0 without a critic
    entropy: np.ndarray  # [R] float32, nats, of the policy at token t


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """What every loss is about: what stands after a prompt, and what each of its tokens weighs.

    A supervised example is nothing more; its response is the target, which ends with EOS.
    """

    prompt_ids: np.ndarray  # [P] int32, P >= 1
    response_ids: np.ndarray  # [R] int32
    weights: np.ndarray  # [R] float32, loss weight of a token against the others of its minibatch; 0: it is left out

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class TrainSample(TrainSequence):
    """One response as PPO trains on it. The learner is reward-blind: advantages and returns, never spans."""

    advantages: np.ndarray  # [R] float32, whitened over the global batch
    returns: np.ndarray  # [R] float32, from unwhitened advantages
    values: np.ndarray  # [R] float32, old values
    old_logprobs: np.ndarray  # [R] float32
    rollout_logprobs: np.ndarray  # [R] float32
    ref_logprobs: np.ndarray  # [R] float32


@dataclass(frozen=True, kw_only=True)
class PairedSequence(TrainSequence):
    """One of the two responses of a preference pair: the chosen one comes first, the rejected one follows it."""

    ref_logprobs: np.ndarray  # [R] float32


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """One optimizer step after the other; over the sequences of each the weights sum to 1."""

    minibatches: tuple[tuple[TrainSequence, ...], ...]
    kl_coef: float = 0.0  # coefficient of the loss term; 0 where KL is paid in the reward (k1)


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    policy_version: int  # number of updates behind these weights
    metrics: dict[str, float]
    # What the update's own pass saw before its only step, in order of the batch; () where `forward` has said it.
    stats: tuple[TokenStats, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WeightSyncResult:
    """One version of the weights in the engines. Fields below `probe_gap` say what it cost."""

    policy_version: int
    seconds: float
    bytes: int  # sent to each worker
    probe_gap: float  # largest |engine - learner| logprob over the probe tokens, nats
    stages: dict[str, float] = field(default_factory=dict)  # seconds, by names in `t2g.runs.metrics`
    num_calls: int = 0  # calls of workers and of the learner group
    missed: tuple[str, ...] = ()  # workers that did not get it: STALE, or lost
