"""Weights from the learner group into every rollout engine: sent by version, checked by hashes, verified by a probe.

The way of one version (`round`): the learner announces names and shapes and streams buckets (`buckets`), every worker
hands them to its engine (`engines.engine`), and each then scores the same 64 tokens and must agree with the learner,
since vLLM does not notice a bad sync. A worker that dies, is late or disagrees drops out of the round, and nobody
waits for it: it is STALE, and catches up in a round of its own.
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
from actors.weights.probe import PROBE_TOKENS, Gap, probe_ids
from actors.weights.round import EngineFleet, Group, Round, SyncTarget, Version, WeightSource, grace_s
from t2g.config import LearnerConfig
from t2g.errors import RunStopped
from t2g.files import write_atomic
from t2g.types import WeightSyncResult

TRIES = 2  # pushes of a version that no worker verified
RECEIVER_POLL_S = 0.2


class WeightSync:
    """Implements `t2g.interfaces.WeightSync`."""

    def __init__(
        self,
        learner: WeightSource,
        fleet: EngineFleet,
        config: LearnerConfig,
        *,
        prompts: Sequence[np.ndarray] = (),
        kept: Path | None = None,
    ) -> None:
        """prompts: [P] int32 each, which the probe is made of. kept: a file of the run, for how far engines and learner
        were apart on the checkpoint, which nobody can measure once there is another version."""
        self._learner, self._fleet, self._config, self._kept = learner, fleet, config, kept
        self._probe = probe_ids(prompts, fleet.vocab_size, min(PROBE_TOKENS, fleet.config.max_model_len - 1))
        if kept is not None and kept.exists():
            fleet.baseline_gap = Gap(**json.loads(kept.read_bytes()))
        self._held: Version | None = None  # the last version that was sent
        self._held_s = 0.0  # that its push took
        self._group = Group()
        self.sending = asyncio.Lock()  # of push and catch_up
        self._catching_up: tuple[Round, asyncio.Future[list[float]]] | None = None

    async def push(self, policy_version: int) -> WeightSyncResult:
        """Send to all workers there are, once more whole when none of them got it; returns when one or more have it.

        Waits where no worker is up, and for none that catches up from what is held: it gets this version. Raises
        RunStopped when no worker has it within learner.step_timeout_s, or after two tries, with every worker's reason,
        and LearnerLost as `catch_up`.
        """
        before = self._held and replace(self._held, held=[], before=None)
        self._held = None  # frees the object store for the new version, which also serves waiting catch-ups
        self._take_over()
        async with self.sending:
            started = time.monotonic()
            shapes, made_at = await asyncio.to_thread(self._learner.announce), self._learner.policy_version
            version = Version(number=policy_version, made_at=made_at, shapes=shapes, probe=self._probe, before=before)
            if policy_version == 0:
                await self._agree(version)
            for _ in range(TRIES):
                gaps = await self._round(version, await self._some_receivers()).deliver()
                self._held, self._held_s = version, time.monotonic() - started
                if gaps:
                    return WeightSyncResult(
                        policy_version=policy_version,
                        seconds=self._held_s,
                        bytes=num_bytes(shapes, self._fleet.config.dtype),
                        probe_gap=max(gaps),
                        stages=dict(version.stages),
                        num_calls=version.num_calls,
                        missed=tuple(sorted(version.missed.keys() - {receiver.name for receiver in version.verified})),
                    )
        reasons = "; ".join(f"{name} {reason}" for name, reason in sorted(version.missed.items()))
        raise RunStopped(f"no rollout worker got version {policy_version} of the weights, sent twice: {reasons}")

    async def _agree(self, version: Version) -> None:
        """Measure how far engines and learner are apart before anything was sent, and keep it. Of engines that have
        served another run, that run has.

        Raises RunStopped where they are so far apart that they cannot have the same model.
        """
        fresh = [receiver for receiver in await self._some_receivers() if receiver.version is None]
        if fresh:
            gap, floor = await self._round(version, fresh).agree(), self._config.probe_floor(self._fleet.config)
            if gap is not None and gap.median > floor:
                raise RunStopped(
                    f"engines and learner loaded model.policy, and are {gap.median:.3g} nats apart in the median of "
                    f"{len(self._probe)} tokens before anything was sent; learner.probe_tolerance={floor:g} allows no "
                    "more: they compute different models"
                )
            self._fleet.baseline_gap = gap or self._fleet.baseline_gap
        if self._kept is not None and self._fleet.baseline_gap is not None:
            write_atomic(self._kept, json.dumps(asdict(self._fleet.baseline_gap), indent=1).encode())

    def _take_over(self) -> None:
        """From a worker that catches up from what is held; where the learner sends, its ranks are in the middle of it.

        A function of its own: what is cancelled keeps the buckets that it was to send as long as anybody knows it.
        """
        if self._catching_up is not None and self._config.is_replayable:
            round_, delivery = self._catching_up
            round_.participants.clear()  # no worker missed anything
            delivery.cancel()

    async def catch_up(self, receiver: SyncTarget) -> None:
        """Bring a STALE worker the last version that was pushed; the fleet hears of the outcome.

        Does nothing before the first push, which reaches every worker, nor to a worker that a push has reached since,
        nor where a push waits, the engines sleep, or the learner is needed and has gone on. What is held it gets with a
        push's grace. Raises LearnerLost as the learner does, and when what is held was lost with the node of rank 0.
        """
        async with self.sending:
            version = self._held
            if version is None or receiver in version.verified or self._fleet.turn == "learner":
                return
            if not version.held and self._learner.policy_version != version.made_at:
                return
            patience_s = grace_s(self._held_s) if self._config.is_replayable else math.inf
            round_ = self._round(version, [receiver], patience_s)
            delivery = asyncio.ensure_future(round_.deliver())
            self._catching_up = round_, delivery
            try:
                (outcome,) = await asyncio.gather(delivery, return_exceptions=True)
            finally:
                self._catching_up = None
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):  # by a push
                raise outcome

    def _round(self, version: Version, participants: Sequence[SyncTarget], timeout_s: float = math.inf) -> Round:
        deadline = time.monotonic() + min(timeout_s, self._config.step_timeout_s)
        return Round(self._learner, self._fleet, self._config, version, list(participants), deadline, self._group)

    async def _some_receivers(self) -> Sequence[SyncTarget]:
        deadline = time.monotonic() + self._config.step_timeout_s
        while not (receivers := self._fleet.receivers()):
            if time.monotonic() > deadline:
                raise RunStopped(f"no rollout worker was up for weights within {self._config.step_timeout_s:g} s")
            await asyncio.sleep(RECEIVER_POLL_S)
        return receivers
