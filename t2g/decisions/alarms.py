"""Alarms: words for a run that drifts. They stop nothing; the stops are in the trainer."""

from collections.abc import Callable, Mapping, Sequence

from t2g import metrics as m
from t2g.sections import AlarmConfig

Step = Mapping[str, float | None]


def alarms(history: Sequence[Step], config: AlarmConfig) -> list[str]:
    """Sentences for the bounds that the last step of `history` crossed; a bound that was crossed before is silent.

    `history` holds the metrics of every step so far, those before a resume included: a resumed run repeats nothing.
    """
    first_length = next((step[m.LENGTH] for step in history if step.get(m.LENGTH)), None)
    rules: tuple[tuple[str, Callable[[float], str | None]], ...] = (
        (m.KL, lambda value: _kl(value, config)),
        (m.ENTROPY, lambda value: _entropy(value, config)),
        (m.LENGTH, lambda value: _length(value, first_length, config)),
        (m.FAILED_SHARE, lambda value: _failed(value, config)),
    )
    return [sentence for name, rule in rules if (sentence := _on_crossing(history, name, rule)) is not None]


def _on_crossing(history: Sequence[Step], name: str, rule: Callable[[float], str | None]) -> str | None:
    """The rule's sentence on the last step, unless it spoke on the step before that had the metric."""
    if not history or history[-1].get(name) is None:
        return None
    values = [step[name] for step in history if step.get(name) is not None]
    sentence = rule(values[-1])
    if sentence is None or (len(values) > 1 and rule(values[-2]) is not None):
        return None
    return sentence


def _kl(value: float, config: AlarmConfig) -> str | None:
    if value <= config.max_kl:
        return None
    return (
        f"the KL to the reference is {value:.1f} nats per sequence, above alarms.max_kl={config.max_kl:g}: "
        "raise objective.kl_coef or lower learner.policy.lr"
    )


def _entropy(value: float, config: AlarmConfig) -> str | None:
    if value >= config.min_entropy:
        return None
    return (
        f"the entropy is {value:.4f} nats per token, below alarms.min_entropy={config.min_entropy:g}, so that samples "
        "hardly differ: raise objective.kl_coef or rollout.temperature, or lower learner.policy.lr"
    )


def _length(value: float, first: float | None, config: AlarmConfig) -> str | None:
    if not first or 1 / config.length_ratio <= value / first <= config.length_ratio:
        return None
    direction = "longer than alarms.length_ratio" if value > first else "shorter than 1 / alarms.length_ratio"
    return (
        f"responses have {value:.1f} tokens on average, {value / first:.2f} times the first step's {first:.1f}, "
        f"{direction} allows ({config.length_ratio:g}): read samples.jsonl for feedback that pays for length, or raise "
        "objective.kl_coef"
    )


def _failed(value: float, config: AlarmConfig) -> str | None:
    if value <= config.max_failed_share:
        return None
    return (
        f"{value:.0%} of the responses have no usable feedback, above alarms.max_failed_share="
        f"{config.max_failed_share:.0%}: look at feedback.status in samples.jsonl and at feedback.timeout_s"
    )
