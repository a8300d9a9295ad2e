"""cluster.gpu_sharing=alternate: engines and ranks have the same GPUs in turn.

Engines that sleep keep their weights in host memory and forget every prefix; ranks that rest keep the weights, whole
or in parts, where they are, so that they can still be gathered, sent and written: only the optimizer's states and the
gradients leave. So a turn of the engines begins with a push, with samples, or after a checkpoint, all the same.
"""

import asyncio
from typing import Protocol

from actors.weights.round import EngineFleet, SyncTarget
from t2g.errors import MissedSync, RunStopped
from t2g.interfaces import Turn


class Rester(Protocol):
    def rest(self, on: bool) -> None:
        """Of the learner group: leave the GPUs, but for the weights, or come back. Blocking; LearnerLost."""


class Turns:
    """Implements `t2g.interfaces.Turns`. Before there is a `learner`, only the engines rest."""

    learner: Rester | None = None

    def __init__(self, fleet: EngineFleet, *, timeout_s: float) -> None:
        self._fleet, self._timeout_s = fleet, timeout_s
        self.sending = asyncio.Lock()  # that of the weight sync: no engine sleeps in the middle of a catch-up

    async def take(self, turn: Turn) -> None:
        """Returns when the others have left the GPUs to them. RunStopped with the name of an engine that does not."""
        if turn != self._fleet.turn:
            async with self.sending:
                await self._take(turn)

    async def _take(self, turn: Turn) -> None:
        if turn == "engines" and self.learner is not None:
            await asyncio.to_thread(self.learner.rest, True)
        errors = await asyncio.gather(
            *(self._rest(receiver, turn == "learner") for receiver in self._fleet.receivers())
        )
        if wrong := [error for error in errors if error]:
            raise RunStopped(f"engines and ranks cannot take turns on their GPUs: {'; '.join(wrong)}")
        if turn == "learner" and self.learner is not None:
            await asyncio.to_thread(self.learner.rest, False)
        self._fleet.turn = turn

    async def _rest(self, receiver: SyncTarget, on: bool) -> str:
        """What went wrong."""
        what = "its sleep" if on else "its waking"
        try:
            request = self._fleet.ask(receiver, lambda worker: worker.rest.remote(on), what)
            await asyncio.wait_for(request, self._timeout_s)
        except MissedSync as error:
            return f"{receiver.name} {error}"
        except TimeoutError:
            return f"{receiver.name} is late: {what} took it more than {self._timeout_s:g} s"
        return ""
