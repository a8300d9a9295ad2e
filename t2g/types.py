"""Frozen records that are passed between packages, one for each step of the data flow.

Every `[R]` array is aligned with `response_ids`: entry t belongs to the t-th response token. The shift between a token
and the position that predicts it happens in `t2g.algo.logprobs` only.

Shape letters: P prompt tokens, R response tokens.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from t2g.config.validation_errors import format_first_error

FeedbackStatus = Literal["ok", "empty", "unparsable", "failed"]
FinishReason = Literal["stop", "length"]


def read_table_integer(value: Any) -> Any:
    """Return 2 for 2.0, None for NaN, and other values as they are.

    A table stores a column of integers in which some are missing as floats.
    """
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else value


def _replace_none(value: Any) -> Any:
    return 1 if value is None else value


_WHOLE_NUMBER = BeforeValidator(lambda value: _replace_none(read_table_integer(value)))
_NULL_IS_ONE = BeforeValidator(_replace_none)  # NaN is refused: a confidence may be the result of a division by zero
MAX_SEVERITY = 3
Severity = Annotated[int, Field(strict=True, ge=1, le=MAX_SEVERITY), _WHOLE_NUMBER]
Occurrence = Annotated[int, Field(strict=True, ge=1), _WHOLE_NUMBER]
Confidence = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False), _NULL_IS_ONE]
MAX_FIX_CHARS = 4000
USABLE = ("ok", "empty")
LABELS: dict[str, Literal[-1, 1]] = {"good": 1, "poor": -1}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt of the policy."""

    prompt_id: str  # unique in a data set
    prompt_text: str  # the user's text, for the feedback source and the report
    task: str  # name of the task, as in config
    # [P] int32, chat template applied; empty if the policy is not sampled
    prompt_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    payload: dict[str, Any] = field(default_factory=dict)  # other fields of the record: reference, facts, tests
    messages: tuple[dict[str, str], ...] = ()  # the chat that the policy answers, for feedback functions; (): unknown
    is_chat: bool = False  # `Task.is_chat`: a reward function gets messages, as in TRL
    # Base name of the record's file, "" if unknown. It identifies nothing: files may be renamed during a run.
    data_file: str = ""

    @property
    def chat(self) -> tuple[dict[str, str], ...]:
        """Return the messages; without any, the text as the user's only message."""
        return self.messages or ({"role": "user", "content": self.prompt_text},)


# malformed: unreadable, unknown tool, wrong arguments; failed: the tool raised; lost: no usable answer of the tool, or
# too many calls, which is not the fault of the arguments
ToolStatus = Literal["ok", "malformed", "failed", "lost"]


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """A tool's message about a call. Characters are those of the turn's answer."""

    tool: str  # "" for a call of an unknown tool, or one that cannot be read
    text: str
    status: ToolStatus = "ok"
    characters: tuple[int, int]  # the call
    arguments: dict[str, tuple[int, int]] = field(default_factory=dict)  # each argument by its JSON path
    # The part of an unreadable call that its problem is about: the character where its text ceased to be JSON.
    error_characters: Annotated[tuple[int, int] | None, Field(exclude_if=lambda place: place is None)] = None

    @property
    def is_fault(self) -> bool:
        """Return whether the message is an error that the call caused."""
        return self.status in ("malformed", "failed")


@dataclass(frozen=True, kw_only=True)
class PolicyTurn:
    """What the policy sampled between two messages of the environment; a response of a single turn is one, too."""

    tokens: tuple[int, int]  # half-open range of response_ids
    characters: tuple[int, int]  # half-open range of response_text
    answer_start: int | None  # first character of the answer in response_text; None: the turn ended within its thinking
    reply: str = ""  # the environment's message about the turn; between two turns it was inserted
    # The tools' messages, if the turn has calls; `reply` is then their text.
    results: Annotated[tuple[ToolResult, ...], Field(exclude_if=lambda results: not results)] = ()


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled response, or a conversation with an environment.

    `response_text` is decoded by `t2g.text.offsets`, not by the engine. In a conversation it is the transcript: each
    turn as sampled, and between two turns the environment's message under headings.
    """

    prompt_id: str
    sample_index: int  # 0, 1, ...: which of the step's responses to this prompt
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32, EOS included if it was sampled; with the tokens between the turns
    rollout_logprobs: np.ndarray  # [R] float32, by the engine, of softmax(logits / temperature); 0 if inserted
    response_text: str
    finish_reason: FinishReason
    policy_versions: tuple[tuple[int, int, int], ...]  # (start, end, version) of tokens [start, end)
    # First character of the (last) answer; None: the response ended within its thinking.
    answer_start: int | None = 0
    environment_turns: tuple[PolicyTurn, ...] = ()  # (): a response of a single turn, without an environment
    metrics: dict[str, float] = field(default_factory=dict)  # the environment's own numbers
    failure: str = ""  # why the environment gave no reply; such a conversation is not trained on
    is_window_full: bool = False  # the conversation ended because another turn would not fit into the engine's window

    @property
    def turns(self) -> tuple[PolicyTurn, ...]:
        """Return the turns; without an environment the response is the only one."""
        if self.environment_turns:
            return self.environment_turns
        single_turn = PolicyTurn(
            tokens=(0, len(self.response_ids)),
            characters=(0, len(self.response_text)),
            answer_start=self.answer_start,
        )
        return (single_turn,)

    @cached_property
    def policy_mask(self) -> np.ndarray:
        """Return whether the policy sampled a token, [R] bool; False: the environment inserted it."""
        mask = np.ones(len(self.response_ids), bool)
        for turn, following in pairwise(self.environment_turns):
            _, end = turn.tokens
            next_start, _ = following.tokens
            mask[end:next_start] = False
        return mask

    @property
    def has_answer(self) -> bool:
        """Return whether a turn ended its thinking, or had none: what follows can be judged."""
        return any(turn.answer_start is not None for turn in self.turns)

    @property
    def answer(self) -> str:
        """Return the (last) response without its thinking: what is measured; "" if it ended within its thinking."""
        return "" if self.answer_start is None else self.response_text[self.answer_start :]

    def answer_of(self, turn: PolicyTurn) -> str:
        """Return the text of one of the turns without its thinking."""
        if turn.answer_start is None:
            return ""
        _, end = turn.characters
        return self.response_text[turn.answer_start : end]

    @property
    def is_unfinished(self) -> bool:
        """Return whether the response pays the truncation penalty: it was truncated, or ended within its thinking."""
        return self.is_truncated or self.answer_start is None

    @property
    def is_truncated(self) -> bool:
        """Return whether max_new_tokens ended the response, and not EOS."""
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A character range of a response that the critique calls good or poor."""

    __pydantic_config__: ClassVar = ConfigDict(revalidate_instances="always")  # users' functions make spans, too

    start: int  # half-open character range of response_text
    end: int
    label: Literal[-1, 1]  # +1 good, -1 poor
    severity: Severity = 1
    # Reliability of the span, a factor of its reward; 1 is not written into a record.
    confidence: Annotated[Confidence, Field(exclude_if=lambda confidence: confidence == 1)] = 1.0
    critique_range: tuple[int, int] | None = None  # characters of the critique that are about the span
    # The text that should stand in place of a poor span, "" for none; None: not known, and not written into a record.
    fix: Annotated[str | None, Field(max_length=MAX_FIX_CHARS, exclude_if=lambda fix: fix is None)] = None
    # The criterion whose source gave the span; None: a single source.
    criterion: Annotated[str | None, Field(exclude_if=lambda criterion: criterion is None)] = None

    def __post_init__(self) -> None:
        if self.fix is not None and self.label == 1:
            raise ValueError(f"a good span has the fix {self.fix!r:.80}; only a poor span has one")


@dataclass(frozen=True, kw_only=True)
class CriterionResult:
    """The result of one of several criteria. Its spans are those of the feedback that have its name."""

    status: FeedbackStatus
    critique_range: tuple[int, int]  # characters of the joined critique that this criterion wrote
    reason: str = ""

    @property
    def usable(self) -> bool:
        return self.status in USABLE


@dataclass(frozen=True, kw_only=True)
class SpanFeedback:
    """A critique and its spans."""

    critique: str
    spans: tuple[Span, ...]
    status: FeedbackStatus
    source: str  # FeedbackSource.name; several are joined by "+"
    version: str  # version of the source: model folder and prompt template, or import path
    num_quotes: int = 0  # quotes given by the source
    num_located: int = 0  # quotes that occur in the response
    execution: dict[str, Any] = field(default_factory=dict)  # result of a program: {"passed": False, ...}, JSON
    agreement: float | None = None  # between several annotators: mean pairwise token F1 of their labels, 0 .. 1
    reason: str = ""  # why it is failed or unparsable, or was not judged; a sentence
    metrics: dict[str, float] = field(default_factory=dict)  # a function's own finite numbers, averaged over a step
    # The result of each of several criteria; {}: a single source.
    criteria: Annotated[dict[str, CriterionResult], Field(exclude_if=lambda criteria: not criteria)] = field(
        default_factory=dict
    )

    # Training: the number of each source of objective.outcome_rewards that applies.
    outcomes: Annotated[dict[str, float], Field(exclude_if=lambda outcomes: not outcomes)] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Return whether the response can be trained on; other feedback is only counted."""
        return self.status in USABLE


_FEEDBACK = TypeAdapter(SpanFeedback)


def read_feedback(record: Any) -> SpanFeedback:
    """Return the feedback of a record: `dataclasses.asdict` of feedback, written as JSON and read again.

    Raises:
        ValueError: The record is not feedback.
    """
    try:
        return _FEEDBACK.validate_python(record)
    except ValidationError as error:
        raise ValueError(f"feedback: {format_first_error(error)}") from None


class JudgedResponse(NamedTuple):
    """A response with the feedback on it."""

    prompt: Prompt
    rollout: Rollout
    feedback: SpanFeedback


@dataclass(frozen=True, kw_only=True)
class CriterionRewards:
    """The spans' rewards of one criterion of a response, before its weight; see `ScoredRollout` for the arrays."""

    token_rewards: np.ndarray  # [R] float32
    span_values: np.ndarray  # [R] float32
    weight: float


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """A rollout with its feedback projected onto the sampled tokens.

    `token_rewards` are what `objective.rewards` pays, by default a span once, at its last token. `span_values`
    say which tokens are good or poor: each token of a span has the span's value.

        response "so good, so bad", spans good "so good", poor "bad", tokens "so" " good" "," " so" " bad"
        token_rewards [0, 1, 0, 0, -1], span_values [1, 1, 0, 0, -1]
    """

    rollout: Rollout
    feedback: SpanFeedback
    token_rewards: np.ndarray  # [R] float32, paid by objective.rewards; before placement, span_coef, KL
    span_values: np.ndarray  # [R] float32, the paper's delta, whatever unit objective.rewards pays
    sentence_ids: np.ndarray  # [R] int32, 0, 1, ...: index of the sentence, or line of code, of token t
    answer_mask: np.ndarray  # [R] bool, whether the token belongs to an answer: no thinking, nothing inserted
    outcome_reward: float = 0.0  # sum of the feedback's `outcomes`, times the weights of objective.outcome_rewards
    truncation_penalty: float = 0.0  # <= 0, paid at the last token of an unfinished response
    criterion_rewards: dict[str, float] = field(default_factory=dict)  # sum of token_rewards by criterion, if several
    # With objective.normalize_criteria: the criteria that judged the response; "" is a single source.
    criteria: dict[str, CriterionRewards] = field(default_factory=dict)

    @property
    def rewards(self) -> np.ndarray:
        """[R] float32: token_rewards plus the truncation penalty at the last token; before placement, span_coef, KL."""
        rewards = self.token_rewards.copy()
        rewards[-1:] += self.truncation_penalty
        return rewards


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """The learner's numbers of a rollout before the update. `forward` leaves 0 where `UpdateResult.stats` has them."""

    old_logprobs: np.ndarray  # [R] float32, policy that will be updated
    ref_logprobs: np.ndarray  # [R] float32, frozen reference
    values: np.ndarray  # [R] float32, critic's value of the state before token t; 0 without a critic
    entropy: np.ndarray  # [R] float32, nats, of the policy at token t
    # [R, k] int32, the policy's likeliest tokens at t, likeliest first; empty unless a teacher is distilled
    top_ids: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """A prompt and a response without their texts."""

    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32


@dataclass(frozen=True, kw_only=True)
class TeacherQuery:
    """A response after the teacher's prompt, and the tokens whose log-probabilities the teacher is to return."""

    prompt_ids: np.ndarray  # [P] int32, with the critique
    response_ids: np.ndarray  # [R] int32
    top_ids: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # [R, k], see `TokenStats`


@dataclass(frozen=True, kw_only=True)
class TeacherStats:
    """The log-probabilities of the teacher, which reads a critique."""

    logprobs: np.ndarray  # [R] float32, of the sampled tokens
    # [R, k] float32, of `TokenStats.top_ids`; empty without them
    top_logprobs: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """A sequence to train on: prompt, response, and a loss weight for each response token.

    In a supervised example the response is the target, which ends with EOS.
    """

    prompt_ids: np.ndarray  # [P] int32, P >= 1
    response_ids: np.ndarray  # [R] int32
    weights: np.ndarray  # [R] float32, relative to the other tokens of the minibatch; 0 leaves a token out

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class TrainSample(TrainSequence):
    """One response for PPO. The learner gets advantages and returns, but neither rewards nor spans."""

    advantages: np.ndarray  # [R] float32, after objective.whiten, local credit and a teacher that scales
    returns: np.ndarray  # [R] float32, from unwhitened advantages
    values: np.ndarray  # [R] float32, old values
    old_logprobs: np.ndarray  # [R] float32
    rollout_logprobs: np.ndarray  # [R] float32
    ref_logprobs: np.ndarray  # [R] float32


@dataclass(frozen=True, kw_only=True)
class DistillationSample(TrainSample):
    """One response for PPO with a teacher that is distilled."""

    top_ids: np.ndarray  # [R, k] int32, see `TokenStats`
    teacher_logprobs: np.ndarray  # [R, k] float32, of top_ids
    teacher_mask: np.ndarray  # [R] float32, 1; 0 for a response whose critique the teacher has not read


@dataclass(frozen=True, kw_only=True)
class PairedSequence(TrainSequence):
    """One of the two responses of a preference pair: the chosen one comes first, the rejected one follows it."""

    ref_logprobs: np.ndarray  # [R] float32


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """The minibatches of an update, one optimizer step each; the weights of each sum to 1."""

    minibatches: tuple[tuple[TrainSequence, ...], ...]
    kl_coef: float = 0.0  # coefficient of the loss term; 0 if the KL is part of the reward (k1)


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """The result of an update."""

    policy_version: int  # number of calls of `update`, those that warm up the critic included
    metrics: dict[str, float]
    # Statistics of the update's forward pass before its only step, in order of the batch; () if `forward` had them.
    stats: tuple[TokenStats, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WeightSyncResult:
    """The sync of one version of the weights to the engines, with its cost."""

    policy_version: int
    seconds: float
    bytes: int  # sent to each worker
    probe_gap: float  # largest |engine - learner| logprob over the probe tokens, nats
    timings: dict[str, float] = field(default_factory=dict)  # seconds, by names in `t2g.metrics`
    num_calls: int = 0  # calls of workers and of the learner group
    missed: tuple[str, ...] = ()  # workers that did not get the weights: stale or lost


TokenSequence = Rollout | TokenIds | TeacherQuery | TrainSequence  # has prompt_ids and response_ids
