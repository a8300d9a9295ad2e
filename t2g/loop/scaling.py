"""Autoscaling of rollout workers: one more, one less, or no change."""

from collections.abc import Sequence
from dataclasses import dataclass

from t2g.config import WorkersConfig

WINDOW_STEPS = 3  # number of steps that are judged together
MIN_LEARNER_IDLE = 0.3  # share of the window in which the learner waits for samples, at or above it a worker is added
MAX_ROLLOUT_IDLE = 0.5  # rollout engines that are idle for a smaller share need another worker
MAX_BACKLOG_STEPS = 1.0  # backlog, in steps' worth of finished samples that wait for feedback or for the learner
MIN_SPARE_WORKERS = 1.25  # idle time, in workers' worth, that allows one less; above 1: the others need a margin


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """Idle times and backlog of one step."""

    seconds: float  # seconds of the step, above 0
    num_workers: int  # rollout workers that served
    learner_idle: float  # share of the step's time in which the learner waited for samples, 0 .. 1
    rollout_idle: float  # share of the rollout engines' time without a request, 0 .. 1
    buffered: float  # finished samples that wait at the end of the step, as a multiple of a step's samples


def compute_target_workers(steps: Sequence[StepLoad], *, current: int, joining: bool, workers: WorkersConfig) -> int:
    """Return the target number of workers, in [workers.min, workers.max].

    If the learner starves without a backlog, rollouts are the bottleneck: the fleet grows by one, if its engines are
    busy. Otherwise it shrinks by one, if its idle time is worth more than a whole worker. Only the last WINDOW_STEPS
    steps count, and only if all of them had `current` workers. They are averaged: with max_staleness 1 and slow engines
    the samples of two steps arrive together, and the learner waits in every other step only.

    Args:
        current: Workers that are requested and not given up.
        joining: Whether a worker is starting; nothing changes then.

    Two engines that are never idle, and a learner that waits during 40 % of three steps:

    >>> short = StepLoad(seconds=9.0, num_workers=2, learner_idle=0.4, rollout_idle=0.0, buffered=0.0)
    >>> compute_target_workers([short] * 3, current=2, joining=False, workers=WorkersConfig(min=1, max=4))
    3

    Four engines that are idle for 35 % of the time (1.4 workers' worth), and a backlog of one step:

    >>> ample = StepLoad(seconds=9.0, num_workers=4, learner_idle=0.0, rollout_idle=0.35, buffered=1.0)
    >>> compute_target_workers([ample] * 3, current=4, joining=False, workers=WorkersConfig(min=1, max=4))
    3
    """
    size = min(max(current, workers.min), workers.max)
    window = steps[-WINDOW_STEPS:]
    if size != current or joining or len(window) < WINDOW_STEPS:
        return size
    if any(step.num_workers != current for step in window):
        return size

    seconds = 0.0
    learner_idle_s = 0.0
    rollout_idle_s = 0.0
    buffered = 0.0
    for step in window:
        seconds += step.seconds
        learner_idle_s += step.seconds * step.learner_idle
        rollout_idle_s += step.seconds * step.rollout_idle
        buffered += step.buffered
    learner_idle = learner_idle_s / seconds
    rollout_idle = rollout_idle_s / seconds
    backlog_steps = buffered / WINDOW_STEPS

    if learner_idle >= MIN_LEARNER_IDLE and backlog_steps < MAX_BACKLOG_STEPS:
        engines_are_busy = rollout_idle < MAX_ROLLOUT_IDLE
        return min(size + 1, workers.max) if engines_are_busy else size
    idle_workers = rollout_idle * current
    if idle_workers >= MIN_SPARE_WORKERS:
        return max(size - 1, workers.min)
    return size
