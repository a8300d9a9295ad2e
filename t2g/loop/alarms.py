"""Alarms: warnings about a run that drifts. An alarm never stops the run; only the trainer does."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import hypot, inf
from statistics import fmean

from t2g.config import AlarmConfig
from t2g.runs import metrics as m

Step = Mapping[str, float | None]
RECALL_STEPS = 3  # window of the mean recall of a fault class
EARLY_SHARE = 0.25  # of alarms.max_kl; the first steps of every run double a smaller KL


def find_alarms(history: Sequence[Step], config: AlarmConfig, *, truncation_penalty: float = 0.0) -> list[str]:
    """Return a sentence for each bound that the last step crossed, unless the step before was beyond it already.

    A KL that doubles within a step is reported above EARLY_SHARE of its bound.

    Args:
        history: The metrics of every step so far. Steps before a resume are included, so that no alarm is repeated.
        truncation_penalty: The run's objective.truncation_penalty, for the advice.
    """
    sentences = _find_reward_hacking(history, config.hacking_evaluations)
    recalls = [name for name in history[-1] if name.startswith(m.RECALL)] if history else []
    criteria = [name for name in history[-1] if name.startswith(m.CRITERION_FAILED)] if history else []
    names = (m.KL, m.ENTROPY, m.LENGTH, m.TRUNCATED_SHARE, m.UNANSWERED_SHARE, m.FAILED_SHARE, m.NEUTRAL_SHARE)
    for name in (*names, m.LOCATED_RATE, m.TEACHER_CONTRAST, m.TEACHER_SHARE, *recalls, *criteria):
        values = [step[name] for step in history if step.get(name) is not None]
        if not values or history[-1].get(name) is None:
            continue
        if name in recalls:  # a step has few faults of a class: a single fault would raise an alarm
            values = [fmean(values[max(0, end - RECALL_STEPS) : end]) for end in range(1, len(values) + 1)]
        first = next(filter(None, values), 0.0)
        *before, last = [_format_alarm(name, value, first, config, truncation_penalty) for value in values[-2:]]
        if last and not any(before):
            sentences.append(last)
    kls = [0.0, *(step[m.KL] for step in history if step.get(m.KL) is not None)]
    is_early = history and history[-1].get(m.KL) is not None and EARLY_SHARE * config.max_kl < kls[-1] <= config.max_kl
    if is_early and kls[-1] > 2 * kls[-2]:
        sentences.append(
            f"the KL to the reference doubled within a step, from {kls[-2]:.1f} to {kls[-1]:.1f} nats per sequence, on "
            f"its way to alarms.max_kl={config.max_kl:g}: lower learner.policy.lr or raise objective.kl_coef"
        )
    return sentences


def _find_reward_hacking(history: Sequence[Step], count: int) -> list[str]:
    """Return the alarm of a training reward that rose `count` times in a row while the task's held-out measure fell.

    The fall since the reward began to rise exceeds 2 standard errors of a difference of two evaluations. The prompts
    are the same, so that the error is an upper bound.
    """
    if not history or history[-1].get(m.HELD_OUT_SCORE) is None or m.HELD_OUT_ERROR not in history[-1]:
        return []  # no evaluation, or the score is the feedback's own, which has no standard error
    pairs = m.pair_evaluations(history, m.HELD_OUT_SCORE)
    errors = [step.get(m.HELD_OUT_ERROR) for step in history if step.get(m.HELD_OUT_SCORE) is not None]
    errors = [inf if error is None else error for error in errors[-len(pairs) :]]  # None: not known
    start, found, before = 0, False, False
    for end, ((a, b), (c, d)) in enumerate(pairwise(pairs), start=1):
        start = start if a < c and b > d else end
        noise = 2 * hypot(errors[start], errors[end])
        found, before = end - start >= count and pairs[start][1] - d > noise, found
    if not found or before:
        return []
    (first_reward, first_score), (last_reward, last_score) = pairs[start], pairs[-1]
    return [
        f"suspected reward hacking: the training reward rose over {end - start + 1} evaluations ({first_reward:.3f} to "
        f"{last_reward:.3f}) while the held-out score fell ({first_score:.4f} to {last_score:.4f}), by more than 2 "
        f"standard errors ({noise:.4f}): the policy may earn rewards without being better; read samples.jsonl for what "
        "is paid, and compare it with the policy of checkpoints/best"
    ]


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
        case _ if name.startswith(m.RECALL) and value < config.min_fault_recall:
            return (
                f"the feedback calls {value:.0%} of the faults of class {name.removeprefix(m.RECALL)} poor (mean of up "
                f"to {RECALL_STEPS} steps), below alarms.min_fault_recall={config.min_fault_recall:.0%}: the policy "
                "will find out; annotate its responses with jobs.annotate (checkpoint.export=true keeps the policy), "
                "with annotate.planted where the task can, and train the reward model on them (jobs.train_reward)"
            )
        case _ if name.startswith(m.CRITERION_FAILED) and value > config.max_failed_share:
            return (
                f"{value:.0%} of the responses have no usable feedback of criterion "
                f"{name.removeprefix(m.CRITERION_FAILED)}, above alarms.max_failed_share="
                f"{config.max_failed_share:.0%}: look at feedback.criteria in samples.jsonl"
            )
        case m.FAILED_SHARE if value > config.max_failed_share:
            return (
                f"{value:.0%} of the responses have no usable feedback, above alarms.max_failed_share="
                f"{config.max_failed_share:.0%}: read the reasons in dropped.jsonl, and a function's tracebacks in "
                "feedback.log; feedback.timeout_s and feedback.retries may help"
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
