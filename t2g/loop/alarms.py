"""Alarms: warnings about a run that drifts. An alarm never stops the run; only the trainer does."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import hypot, inf
from statistics import fmean

from t2g import metrics as m
from t2g.config import AlarmConfig
from t2g.loop.consistency import BOUNDED as CONSISTENCY
from t2g.loop.consistency import format_consistency_alarm, smallest_recent

Step = Mapping[str, float | None]
RECALL_STEPS = 3  # window of the mean recall of a fault class
EARLY_SHARE = 0.25  # share of alarms.max_kl; the first steps of every run double a smaller KL
_BOUNDED = (
    m.KL,
    m.KL_PER_TOKEN,
    m.ZERO_VARIANCE,
    m.ENTROPY,
    m.LENGTH,
    m.TRUNCATED_SHARE,
    m.UNANSWERED_SHARE,
    m.FAILED_SHARE,
    m.NEUTRAL_SHARE,
    m.LOCATED_RATE,
    m.TEACHER_CONTRAST,
    m.TEACHER_SHARE,
    *CONSISTENCY,
)


def find_alarms(
    history: Sequence[Step], config: AlarmConfig, *, truncation_penalty: float = 0.0, probe_tolerance: float = inf
) -> list[str]:
    """Return a sentence for each bound that the last step crossed, unless the step before was beyond it already.

    A KL that doubles within a step is reported above EARLY_SHARE of its bound.

    Args:
        history: The metrics of every step so far. Steps before a resume are included, so that no alarm is repeated.
        truncation_penalty: The run's objective.truncation_penalty, for the advice.
        probe_tolerance: The difference of logprobs of engine and learner that rounding explains.
    """
    sentences = _find_reward_hacking(history, config.hacking_evaluations)
    if not history:
        return sentences

    last_step = history[-1]
    recalls = [name for name in last_step if name.startswith(m.RECALL)]
    criteria = [name for name in last_step if name.startswith(m.CRITERION_FAILED)]
    for name in (*_BOUNDED, *recalls, *criteria):
        if last_step.get(name) is None:
            continue
        values = _read_values(history, name)
        if name in recalls:  # a step has few faults of a class: a single fault would raise an alarm
            values = _average_recent(values)
        if name == m.SAME_FEEDBACK:
            values = smallest_recent(values)
        first = next(filter(None, values), 0.0)
        alarms = []
        for value in values[-2:]:
            alarm = _format_alarm(name, value, first, config, truncation_penalty)
            alarms.append(alarm or format_consistency_alarm(name, value, probe_tolerance=probe_tolerance))
        *before, last = alarms
        if last and not any(before):
            sentences.append(last)
    return sentences + _find_doubled_kl(history, config.max_kl)


def _read_values(history: Sequence[Step], name: str) -> list[float]:
    """Return the known values of a metric, oldest first."""
    values = []
    for step in history:
        value = step.get(name)
        if value is not None:
            values.append(value)
    return values


def _average_recent(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of the last RECALL_STEPS values up to it."""
    means = []
    for end in range(1, len(values) + 1):
        start = max(0, end - RECALL_STEPS)
        means.append(fmean(values[start:end]))
    return means


def _find_doubled_kl(history: Sequence[Step], max_kl: float) -> list[str]:
    """Return the alarm of a KL that doubled within the last step and is near its bound."""
    if history[-1].get(m.KL) is None:
        return []
    previous, last = [0.0, *_read_values(history, m.KL)][-2:]
    is_near_bound = EARLY_SHARE * max_kl < last <= max_kl
    has_doubled = last > 2 * previous
    if not (is_near_bound and has_doubled):
        return []
    return [
        f"the KL to the reference doubled within a step, from {previous:.1f} to {last:.1f} nats per sequence, on "
        f"its way to alarms.max_kl={max_kl:g}: lower learner.policy.lr or raise objective.kl_coef"
    ]


def _find_reward_hacking(history: Sequence[Step], count: int) -> list[str]:
    """Return the alarm of a training reward that rose `count` times in a row while the task's held-out measure fell.

    The fall since the reward began to rise exceeds 2 standard errors of a difference of two evaluations. The prompts
    are the same, so that the error is an upper bound.
    """
    if not history or history[-1].get(m.HELD_OUT_SCORE) is None or m.HELD_OUT_ERROR not in history[-1]:
        return []  # no evaluation, or the score is the feedback's own, which has no standard error
    pairs = m.pair_evaluations(history, m.HELD_OUT_SCORE)
    errors = _read_errors(history)[-len(pairs) :]

    # `start` is the evaluation from which on the reward rises and the score falls in every one.
    start = 0
    noise = 0.0
    is_found = False
    was_found = False
    for end, (earlier, later) in enumerate(pairwise(pairs), start=1):
        earlier_reward, earlier_score = earlier
        reward, score = later
        is_drifting = earlier_reward < reward and earlier_score > score
        if not is_drifting:
            start = end
        noise = 2 * hypot(errors[start], errors[end])
        _, start_score = pairs[start]
        was_found = is_found
        is_found = end - start >= count and start_score - score > noise
    if not is_found or was_found:
        return []

    num_evaluations = len(pairs) - start
    first_reward, first_score = pairs[start]
    last_reward, last_score = pairs[-1]
    return [
        f"suspected reward hacking: the training reward rose over {num_evaluations} evaluations ({first_reward:.3f} to "
        f"{last_reward:.3f}) while the held-out score fell ({first_score:.4f} to {last_score:.4f}), by more than 2 "
        f"standard errors ({noise:.4f}): the policy may earn rewards without being better; read samples.jsonl for what "
        "is paid, and compare it with the policy of checkpoints/best"
    ]


def _read_errors(history: Sequence[Step]) -> list[float]:
    """Return the standard error of each evaluation, infinity where it is not known."""
    errors = []
    for step in history:
        if step.get(m.HELD_OUT_SCORE) is None:
            continue
        error = step.get(m.HELD_OUT_ERROR)
        errors.append(inf if error is None else error)
    return errors


def _format_alarm(name: str, value: float, first: float, config: AlarmConfig, truncation_penalty: float) -> str:
    """Return the alarm of a metric, "" for a value within its bounds. first: the run's first value that is not 0."""
    match name:
        case m.KL if value > config.max_kl:
            return (
                f"the KL to the reference is {value:.1f} nats per sequence, above alarms.max_kl={config.max_kl:g}: "
                "raise objective.kl_coef or lower learner.policy.lr"
            )
        case m.ENTROPY if value < config.min_entropy:
            return (
                f"the entropy is {value:.4f} nats per token, below alarms.min_entropy={config.min_entropy:g}, so that "
                "samples hardly differ: raise objective.kl_coef or rollout.temperature, or lower learner.policy.lr"
            )
        case m.LENGTH if first and not 1 / config.length_ratio <= value / first <= config.length_ratio:
            direction = "longer than alarms.length_ratio" if value > first else "shorter than 1 / alarms.length_ratio"
            return (
                f"responses have {value:.1f} tokens on average, {value / first:.2f} times the first step's "
                f"{first:.1f}, {direction} allows ({config.length_ratio:g}): read samples.jsonl for feedback that pays "
                "for length, or raise objective.kl_coef"
            )
        case m.TRUNCATED_SHARE if value > config.max_truncated_share:
            return (
                f"rollout.max_new_tokens truncated {value:.0%} of the responses, above alarms.max_truncated_share="
                f"{config.max_truncated_share:.0%}: raise it, {_advise_on_length(truncation_penalty)}"
            )
        case m.UNANSWERED_SHARE if value > config.max_truncated_share:
            return (
                f"{value:.0%} of the responses end within their thinking, above alarms.max_truncated_share="
                f"{config.max_truncated_share:.0%}: they have no answer, and nothing of them is judged; raise "
                "rollout.max_new_tokens, or switch thinking off (model.chat_template_kwargs)"
            )
        case m.NEUTRAL_SHARE if value > 1 - config.min_labelled_share:
            return (
                f"{1 - value:.1%} of the tokens are labelled, below alarms.min_labelled_share="
                f"{config.min_labelled_share:.1%}: hardly anything is paid; read the critiques in samples.jsonl"
            )
        case m.LOCATED_RATE if value < config.min_located_rate:
            return (
                f"{value:.0%} of the feedback's quotes occur in their response, below alarms.min_located_rate="
                f"{config.min_located_rate:.0%}: what the others speak of is not paid; read the critiques in "
                "samples.jsonl, and ask for exact quotes"
            )
        case m.TEACHER_SHARE if value == 0:
            return (
                "no response of the step has a critique for objective.teacher that fits into its prompt, so that the "
                "rewards alone are trained: read the critiques in samples.jsonl, or raise rollout.max_model_len"
            )
        case m.TEACHER_CONTRAST if first < 0 and value < 0:  # later a good policy passes its teacher
            return (
                f"teacher/contrast is {value:.2f} nats: the teacher makes poor tokens likelier, or good ones less "
                "likely than poor ones; it does not follow critiques and will not help: train without objective.teacher"
            )
        case m.FAILED_SHARE if value > config.max_failed_share:
            return (
                f"{value:.0%} of the responses have no usable feedback, above alarms.max_failed_share="
                f"{config.max_failed_share:.0%}: read the reasons in dropped.jsonl, and a function's tracebacks in "
                "feedback.log; feedback.timeout_s and feedback.retries may help"
            )
    return _format_credit_alarm(name, value, config) or _format_class_alarm(name, value, config)


def _format_credit_alarm(name: str, value: float, config: AlarmConfig) -> str:
    """Return the alarm of the KL of a token, or of prompts that carry nothing; "" for a value within its bounds."""
    max_kl = config.max_kl_per_token
    if name == m.KL_PER_TOKEN and max_kl is not None and value > max_kl:
        return (
            f"the KL to the reference is {value:.3g} nats per token, above alarms.max_kl_per_token={max_kl:g}: raise "
            "objective.kl_coef or lower learner.policy.lr"
        )
    if name == m.ZERO_VARIANCE and value > config.max_zero_variance_share:
        return (
            f"the samples of {value:.0%} of the prompts all earn the same at every token, above "
            f"alarms.max_zero_variance_share={config.max_zero_variance_share:.0%}, so that comparing them says "
            "nothing: take prompts of another difficulty, raise rollout.samples_per_prompt, rollout.temperature or "
            "rollout.resample_zero_groups, or pay for more (objective.outcome_rewards, feedback.style)"
        )
    return ""


def _format_class_alarm(name: str, value: float, config: AlarmConfig) -> str:
    """Return the alarm of a metric of one fault class or criterion, "" for a value within its bounds."""
    if name.startswith(m.RECALL) and value < config.min_fault_recall:
        fault_class = name.removeprefix(m.RECALL)
        return (
            f"the feedback calls {value:.0%} of the faults of class {fault_class} poor (mean of up "
            f"to {RECALL_STEPS} steps), below alarms.min_fault_recall={config.min_fault_recall:.0%}: the policy "
            "will find out; annotate its responses with jobs.annotate (checkpoint.export=true keeps the policy), "
            "with annotate.planted where the task can, and train the reward model on them (jobs.train_reward)"
        )
    if name.startswith(m.CRITERION_FAILED) and value > config.max_failed_share:
        criterion = name.removeprefix(m.CRITERION_FAILED)
        return (
            f"{value:.0%} of the responses have no usable feedback of criterion {criterion}, "
            f"above alarms.max_failed_share={config.max_failed_share:.0%}: look at feedback.criteria in samples.jsonl"
        )
    return ""


def _advise_on_length(truncation_penalty: float) -> str:
    """Return what makes responses shorter in a run with this objective.truncation_penalty."""
    if truncation_penalty == 0:
        return "or set objective.truncation_penalty below 0"
    return (
        f"or ask for shorter responses in the prompts (each truncated response pays objective.truncation_penalty="
        f"{truncation_penalty:g} already)"
    )
