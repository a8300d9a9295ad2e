"""cluster.gpu_sharing=alternate: engines and learner ranks share the same GPUs, one of them at a time.

A sleeping engine keeps its weights in host memory and drops its prefix cache. A learner rank offloads optimizer states
and gradients; its weights stay on the GPU, so that they can still be gathered, sent and written. Engines can therefore
take the GPUs for a weight push, for sampling, or after a checkpoint.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from actors.weights.round import EngineFleet, SyncWorker
from t2g.errors import MissedSync, RunStopped
from t2g.interfaces import GpuUser

START_POLL_S = 0.2
RELEASE_S = 5.0  # from the death of an engine until its GPU is free


class OffloadableLearner(Protocol):
    """The learner group. The calls block and raise LearnerLost."""

    def offload_states(self) -> None:
        """Move optimizer states and gradients to host memory."""

    def reload_states(self) -> None:
        """Move optimizer states and gradients back to the GPUs."""


class SharingFleet(EngineFleet, Protocol):
    """The interface of `actors.engines.rollout.RolloutFleet` that time-sharing uses."""

    is_switching_gpus: bool  # no worker is started meanwhile

    def started(self) -> Sequence[SyncWorker]:
        """Return the workers with a loaded model that are not leaving."""

    async def replace_unreachable(self) -> None:
        """Kill the started workers that cannot be reached; successors start later."""


class FleetGpuTimeSharing:
    """Implements `t2g.interfaces.GpuTimeSharing`. Without a `learner`, only the engines sleep and wake up."""

    learner: OffloadableLearner | None = None
    release_s = RELEASE_S

    def __init__(self, fleet: SharingFleet, *, timeout_s: float) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self.sending = asyncio.Lock()  # the lock of the weight sync: no engine may sleep during a catch-up

    def attach_learner(self, learner: OffloadableLearner, sending: asyncio.Lock) -> None:
        """Have a learner take part. `sending` is the lock of its weight sync."""
        self.learner = learner
        self.sending = sending

    async def switch_to(self, user: GpuUser) -> None:
        """Give the GPUs to the engines or to the learner, once the others have released them.

        Raises:
            RunStopped: An engine did not sleep or wake up; the message has its name.
        """
        if user != self._fleet.gpu_user:
            async with self.sending:
                await self._switch_to(user)

    async def _switch_to(self, user: GpuUser) -> None:
        if user == "engines" and self.learner is not None:
            await asyncio.to_thread(self.learner.offload_states)
        while user == "learner" and self._fleet.is_starting:  # it cannot sleep yet; the fleet limits its start
            await asyncio.sleep(START_POLL_S)
        self._fleet.is_switching_gpus = True  # no successor may start on a GPU that a rank is about to take
        try:
            await self._exchange_gpus(user)
        finally:
            self._fleet.is_switching_gpus = False

    async def _exchange_gpus(self, user: GpuUser) -> None:
        should_sleep = user == "learner"
        await self._fleet.replace_unreachable()
        workers = self._fleet.started()
        switches = [self._switch(worker, should_sleep) for worker in workers]
        errors = await asyncio.gather(*switches)
        failed = {worker: error for worker, error in zip(workers, errors, strict=True) if error}
        if failed:
            await self._raise_failures(failed)
        if user == "learner" and self.learner is not None:
            await asyncio.to_thread(self.learner.reload_states)
        self._fleet.gpu_user = user

    async def _raise_failures(self, failed: Mapping[SyncWorker, str]) -> None:
        """Raise RunStopped for the engines that failed and still run. One that died has a successor later."""
        await self._fleet.replace_unreachable()
        await asyncio.sleep(self.release_s)
        remaining = self._fleet.started()
        failures = [error for worker, error in failed.items() if worker in remaining]
        if failures:
            raise RunStopped(f"engines and ranks cannot share their GPUs: {'; '.join(failures)}")

    async def _switch(self, worker: SyncWorker, should_sleep: bool) -> str:
        """Have one engine sleep or wake up; return what failed, "" if nothing."""
        what = "its sleep" if should_sleep else "its wake-up"

        def submit(handle: Any) -> Any:
            if should_sleep:
                return handle.sleep.remote()
            return handle.wake_up.remote()

        try:
            request = self._fleet.request(worker, submit, what)
            await asyncio.wait_for(request, self._timeout_s)
        except MissedSync as error:
            return f"{worker.name} {error}"
        except TimeoutError:
            return f"{worker.name} timed out: {what} took more than {self._timeout_s:g} s"
        return ""
