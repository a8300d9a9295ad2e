"""How many rollout workers a run that scales itself wants: one more, one less, or as many as it has."""

from collections.abc import Sequence
from dataclasses import dataclass

from t2g.config import WorkersConfig

PATIENCE = 3  # steps that are looked at together
STARVING = 0.3  # the learner waits for samples during this share of their time
BUSY = 0.5  # rollout engines idle for less than this share would be relieved by another
PILE = 1.0  # finished samples, in steps' worth, that wait for feedback or for the learner
SPARE = 1.25  # workers' worth of idle time; above 1, so that the fleet is not short again without the one that left


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """Who waited for whom in one step."""

    seconds: float  # of the step, above 0
    num_workers: int  # rollout workers that served in this step
    learner_idle: float  # share of the step's time in which the learner waited for samples, 0 .. 1
    rollout_idle: float  # share of the rollout engines' time without a request, 0 .. 1
    buffered: float  # finished samples that waited when the learner took its batch, in steps' worth


def compute_target_workers(steps: Sequence[StepLoad], *, current: int, joining: bool, workers: WorkersConfig) -> int:
    """The size to ask for, in [workers.min, workers.max]; `current`: asked for and not given up.

    Rollouts are what the learner waits for when it starves and no finished samples pile up. Then the fleet grows by
    one, if its engines are busy; else it shrinks by one, if its idle time is worth more than a whole worker. Only the
    last PATIENCE steps count, all of them with `current` workers, and nothing changes while one is `joining`. They are
    judged together: with max_staleness 1 and slow engines two steps' samples come at once, so that the learner waits
    long in every other step and not at all in the next.

    Two engines without a pause, a learner that waits during 40 % of three steps:

    >>> short = StepLoad(seconds=9.0, num_workers=2, learner_idle=0.4, rollout_idle=0.0, buffered=0.0)
    >>> compute_target_workers([short] * 3, current=2, joining=False, workers=WorkersConfig(min=1, max=4))
    3

    Four engines that idle during 35 % of the time, 1.4 workers' worth, while a step's worth of samples waits:

    >>> ample = StepLoad(seconds=9.0, num_workers=4, learner_idle=0.0, rollout_idle=0.35, buffered=1.0)
    >>> compute_target_workers([ample] * 3, current=4, joining=False, workers=WorkersConfig(min=1, max=4))
    3
    """
    size = min(max(current, workers.min), workers.max)
    last = steps[-PATIENCE:]
    if size != current or joining or len(last) < PATIENCE or any(step.num_workers != current for step in last):
        return size
    seconds = sum(step.seconds for step in last)
    learner_idle = sum(step.seconds * step.learner_idle for step in last) / seconds
    rollout_idle = sum(step.seconds * step.rollout_idle for step in last) / seconds
    buffered = sum(step.buffered for step in last) / PATIENCE
    if learner_idle >= STARVING and buffered < PILE:  # rollouts are what the learner waits for
        return min(size + 1, workers.max) if rollout_idle < BUSY else size
    return max(size - 1, workers.min) if rollout_idle * current >= SPARE else size
