"""Supervision of a run's fleets: their target sizes, set by the operator or by autoscaling, and status.json."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from actors.fleet.fleet import Fleet
from t2g import metrics as m
from t2g.config import PolicyJob
from t2g.config.describe import samples_per_step
from t2g.interfaces import FeedbackSource
from t2g.loop.scaling import WINDOW_STEPS, StepLoad, compute_target_workers
from t2g.runs.control import Control, FleetStatus, Status, get_scalable_fleets, now, write_status

CONTROL_S = 1.0  # between two reads of control.json
STATUS_EVERY = 3  # reads of control.json for each write of status.json
FIELDS = {"rollout": "rollouts", "reward": "rewards"}  # role -> field of control.json


class Steering:
    """Background tasks of the trainer, and its hooks `metrics` and `on_step`."""

    def __init__(self, config: PolicyJob, rollouts: Fleet, feedback: FeedbackSource) -> None:
        self._config = config
        self._fleets: dict[str, Fleet] = {"rollout": rollouts}
        if feedback.fleet:
            self._fleets["reward"] = feedback.fleet
        self._control = Control(config.run.folder, get_scalable_fleets(config))
        self._loads: list[StepLoad] = []
        self._step = 0
        self._metrics: Mapping[str, float] = {}

    def make_background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the background tasks of the trainer. They raise RunStopped if fewer than workers.min are left."""
        supervisions = [fleet.supervise() for fleet in self._fleets.values()]
        return [*supervisions, self._steer()]

    async def _steer(self) -> None:
        num_reads = 0
        while True:
            requested = self._control.read_changes()
            for role, fleet in self._fleets.items():
                field = FIELDS[role]
                if field in requested:
                    fleet.set_target_size(requested[field])
            if num_reads % STATUS_EVERY == 0:
                self.write_status()
            num_reads += 1
            await asyncio.sleep(CONTROL_S)

    async def metrics(self) -> dict[str, float]:
        """Return metrics of each fleet since the last step: idle share, workers, losses, recovery, engine metrics."""
        metrics: dict[str, float] = {}
        for role, fleet in self._fleets.items():
            values = fleet.metrics() | await fleet.engine_metrics()
            metrics[m.IDLE + role] = values.pop("idle")
            metrics |= {f"{role}/{name}": value for name, value in values.items()}
        return metrics

    def set_progress(self, step: int, num_samples: int) -> None:
        """Set the step and samples in status.json to those of the checkpoint, if no step has ended since the start."""
        if self._step == 0:
            self._step = step
            self._metrics = {m.SAMPLES: float(num_samples)}

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._metrics = metrics
        if self._config.rollout.autoscale and step > 0:
            self._scale(metrics)
        self.write_status()

    def _scale(self, metrics: Mapping[str, float]) -> None:
        fleet = self._fleets["rollout"]
        num_workers = int(metrics[m.fill(m.WORKERS, "rollout")])
        buffered = metrics[m.BUFFERED] / samples_per_step(self._config.rollout)
        load = StepLoad(
            seconds=metrics[m.STEP_S],
            num_workers=num_workers,
            learner_idle=metrics[m.IDLE_LEARNER],
            rollout_idle=metrics[m.IDLE + "rollout"],
            buffered=buffered,
        )
        self._loads = [*self._loads, load][-WINDOW_STEPS:]
        workers = self._config.rollout.workers
        current = fleet.expected
        number = compute_target_workers(self._loads, current=current, joining=fleet.joining, workers=workers)
        if number != current:
            fleet.set_target_size(number)

    def write_status(self) -> None:
        idle: dict[str, float] = {}
        for name, value in self._metrics.items():
            if name.startswith(m.IDLE):
                role = name.removeprefix(m.IDLE)
                idle[role] = value
        fleets = [FleetStatus(**fleet.report()) for fleet in self._fleets.values()]
        status = Status(
            step=self._step,
            num_steps=self._config.num_steps,
            samples=int(self._metrics.get(m.SAMPLES, 0)),
            updated=now(),
            fleets=tuple(fleets),
            idle=idle,
        )
        write_status(self._config.run.folder, status)
