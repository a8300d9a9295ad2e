"""Weight sync from the learner group to every rollout engine: versioned, and verified by a probe.

In a round (`round`) the learner sends a manifest of names and shapes, and streams buckets (`buckets`). Every worker
passes them to its engine (`engines.engine`) and then computes the logprobs of the same 64 tokens. They must match the
learner's, since vLLM does not detect a failed sync. A worker that dies, times out or fails the probe drops out of the
round: it is STALE, and catches up in a round of its own.
"""

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from actors.weights.buckets import num_bytes
from actors.weights.probe import PROBE_TOKENS, Gap, make_probe_ids
from actors.weights.round import BroadcastGroup, EngineFleet, Round, SyncWorker, Version, WeightSource, compute_grace_s
from t2g.config import LearnerConfig
from t2g.errors import RunStopped
from t2g.files import read_regular, write_json
from t2g.types import WeightSyncResult

PUSH_TRIES = 2  # pushes of a version that no worker verified
TARGET_POLL_S = 0.2


class FleetWeightSync:
    """Implements `t2g.interfaces.WeightSync`."""

    def __init__(
        self,
        learner: WeightSource,
        fleet: EngineFleet,
        config: LearnerConfig,
        *,
        prompts: Sequence[np.ndarray] = (),
        baseline_file: Path | None = None,
    ) -> None:
        """Prepare the probe and read the baseline gap.

        Args:
            prompts: Prompts that the probe is made of, [P] int32 each.
            baseline_file: File of the run that stores the gap between engines and learner on the checkpoint. The gap
                cannot be measured again once the weights have changed.
        """
        self._learner = learner
        self._fleet = fleet
        self._config = config
        self._baseline_file = baseline_file
        num_tokens = min(PROBE_TOKENS, fleet.config.max_model_len - 1)
        self._probe = make_probe_ids(prompts, fleet.vocab_size, num_tokens)
        baseline = read_regular(baseline_file) if baseline_file is not None else None
        if baseline is not None:
            fleet.baseline_gap = Gap(**json.loads(baseline))
        self._sent: Version | None = None  # the last version that was sent
        self._push_s = 0.0  # duration of its push
        self._group = BroadcastGroup()
        self.sending = asyncio.Lock()  # held by push and catch_up
        self._catching_up: tuple[Round, asyncio.Future[list[float]]] | None = None

    async def push(self, policy_version: int) -> WeightSyncResult:
        """Push the weights to every worker; return once at least one worker has verified them.

        Version 0 is not sent to workers that have it from the model's files: the probe alone verifies them. If no
        worker verifies the new version, the full push is retried once. The call waits while no worker is up. It cancels
        a catch-up from stored buckets: that worker gets the new version.

        Raises:
            RunStopped: No worker verified the version within learner.step_timeout_s or in two attempts. The message has
                the reason of every worker.
            LearnerLost: As `catch_up`.
        """
        previous = self._sent and replace(self._sent, buckets=[], previous=None)
        self._sent = None  # frees the object store for the new version, which also serves waiting catch-ups
        self._cancel_catch_up()
        async with self.sending:
            started = time.monotonic()
            shapes = await asyncio.to_thread(self._learner.get_manifest)
            version = Version(
                number=policy_version,
                learner_version=self._learner.policy_version,
                shapes=shapes,
                probe=self._probe,
                previous=previous,
            )
            gaps = await self._record_baseline_gap(version) if policy_version == 0 else []
            for _ in range(PUSH_TRIES):
                started_workers = await self._wait_for_workers()
                workers = [worker for worker in started_workers if worker not in version.verified]
                if workers:
                    gaps += await self._round(version, workers).deliver()
                self._sent = version
                self._push_s = time.monotonic() - started
                if gaps:
                    return self._make_result(version, max(gaps), was_sent=bool(workers))
        reasons = "; ".join(f"{name} {reason}" for name, reason in sorted(version.missed.items()))
        raise RunStopped(f"no rollout worker got version {policy_version} of the weights, sent twice: {reasons}")

    def _make_result(self, version: Version, probe_gap: float, *, was_sent: bool) -> WeightSyncResult:
        verified = {worker.name for worker in version.verified}
        missed = sorted(version.missed.keys() - verified)
        return WeightSyncResult(
            policy_version=version.number,
            seconds=self._push_s,
            bytes=num_bytes(version.shapes, self._fleet.config.dtype) if was_sent else 0,
            probe_gap=probe_gap,
            timings=dict(version.timings),
            num_calls=version.num_calls,
            missed=tuple(missed),
        )

    async def _record_baseline_gap(self, version: Version) -> list[float]:
        """Measure the gap between engines and learner on the checkpoint, and store it.

        Engines that already served another run keep the gap that this run measured.

        Returns:
            The gap of each worker that has the version without being sent it.

        Raises:
            RunStopped: The gap is so large that engines and learner cannot have the same model.
        """
        gaps: list[float] = []
        started_workers = await self._wait_for_workers()
        fresh = [worker for worker in started_workers if _has_model_files(worker)]
        if fresh:
            round_ = self._round(version, fresh)
            gap, answers = await round_.measure_baseline_gap()
            tolerance = self._config.resolve_probe_tolerance(self._fleet.config)
            if gap is not None and gap.median > tolerance:
                raise RunStopped(
                    "engines and learner compute different models: both loaded model.policy, and before the first push "
                    f"the median difference of {len(self._probe)} logprobs is {gap.median:.3g} nats, above "
                    f"learner.probe_tolerance={tolerance:g}"
                )
            self._fleet.baseline_gap = gap or self._fleet.baseline_gap
            if self._equals_model_files(version):
                gaps = round_.accept(answers)
        if self._baseline_file is not None and self._fleet.baseline_gap is not None:
            write_json(self._baseline_file, asdict(self._fleet.baseline_gap))
        return gaps

    def _equals_model_files(self, version: Version) -> bool:
        """Return whether an engine that loads the model's files has the weights that the learner would send it.

        A bfloat16 learner has rounded weights. With LoRA the engine would have no adapter.
        """
        is_rounded = self._config.dtype == "bfloat16" and self._fleet.config.dtype == "float32"
        return version.number == 0 and self._config.lora is None and not is_rounded

    def _cancel_catch_up(self) -> None:
        """Cancel a catch-up that sends stored buckets: its worker gets the new version in the push.

        A catch-up that gathers from the learner goes on, because its ranks are in a collective.

        This is a separate function because a reference to the cancelled task would keep its buckets in memory.
        """
        if self._catching_up is not None and self._config.is_replayable:
            round_, delivery = self._catching_up
            round_.workers.clear()  # no worker missed anything
            delivery.cancel()

    async def catch_up(self, worker: SyncWorker) -> None:
        """Send a STALE worker the last pushed version, and report the outcome to the fleet.

        Does nothing

        - before the first push, and if a push has reached the worker meanwhile;
        - while the engines sleep;
        - if the version cannot be sent again: no bucket of it is stored, and the learner has newer weights or never
          sent it.

        Raises:
            LearnerLost: A rank is lost, or the stored buckets were lost with the node of rank 0.
        """
        async with self.sending:
            version = self._sent
            if version is None or worker in version.verified or self._fleet.gpu_user == "learner":
                return
            is_replayable = self._config.is_replayable
            has_files = _has_model_files(worker) and self._equals_model_files(version)
            gathers_again = not is_replayable and self._learner.policy_version == version.learner_version
            if not (has_files or version.buckets or gathers_again):
                return
            timeout_s = compute_grace_s(self._push_s) if is_replayable else math.inf
            round_ = self._round(version, [worker], timeout_s)
            steps = round_.verify() if has_files else round_.deliver()
            delivery = asyncio.ensure_future(steps)
            self._catching_up = round_, delivery
            try:
                (outcome,) = await asyncio.gather(delivery, return_exceptions=True)
            finally:
                self._catching_up = None
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):  # by a push
                raise outcome

    def _round(self, version: Version, workers: Sequence[SyncWorker], timeout_s: float = math.inf) -> Round:
        deadline = time.monotonic() + min(timeout_s, self._config.step_timeout_s)
        return Round(self._learner, self._fleet, self._config, version, list(workers), deadline, self._group)

    async def _wait_for_workers(self) -> Sequence[SyncWorker]:
        """Return the workers that are up. While one is starting there is no limit here: the fleet limits its start."""
        limit_s = self._config.step_timeout_s
        deadline = time.monotonic() + limit_s
        while not (workers := self._fleet.begin_sync()):
            if time.monotonic() > deadline and not self._fleet.is_starting:
                reasons = self._fleet.describe_workers()
                raise RunStopped(f"no rollout worker was ready for weights within {limit_s:g} s: {reasons}")
            await asyncio.sleep(TARGET_POLL_S)
        return workers


def _has_model_files(worker: SyncWorker) -> bool:
    """Return whether the worker's weights are those of the model's folder.

    If the learner was lost in an engine's first round, the engine has partly changed weights and is still paused.
    """
    return worker.version is None and not worker.has_begun_update
