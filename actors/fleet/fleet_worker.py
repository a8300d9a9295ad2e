"""One worker of a fleet: its placement group, its process, its running requests."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    RuntimeEnvSetupError,
)
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.cluster import placement
from actors.cluster.fanout import first_line
from actors.fleet.health import Health, State, restarts_left
from t2g.config import EngineConfig

# No answer will come: the worker died, Ray's memory monitor killed it, or a lost node had its answer.
DIED = (RayActorError, OutOfMemoryError, ObjectLostError)
MAX_CALLS = 100_000  # at once; with Ray's 1,000 a health check or weight sync would wait behind requests
UNREACHABLE = (ActorUnavailableError, ObjectLostError)  # a subset of DIED: the node may come back with its workers


def describe_loss(error: Exception) -> Literal["died", "could not be reached"]:
    """Describe what an exception of DIED means for the worker."""
    return "could not be reached" if isinstance(error, UNREACHABLE) else "died"


def describe_error(error: Exception) -> str:
    """Return one line: the error of a call, the error of the constructor, or Ray's reason for refusing the start."""
    lines = str(error).strip().splitlines()
    if "creation task" in str(error):
        return f"{type(error).__name__}: {lines[-1]}"
    if isinstance(error, RuntimeEnvSetupError) and len(lines) > 1:  # its first line gives no reason
        return f"{type(error).__name__}: {lines[1]}"
    return first_line(unwrap_error(error))


def unwrap_error(error: Exception) -> Exception:
    """Return the error that the worker raised, or Ray's error if the worker's could not be pickled."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


class Interrupted(Exception):
    """The worker stopped serving: its requests go to another worker."""


class RequestTimedOut(Exception):
    """Raised by a request of several calls, one of which missed its deadline."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s
        self.was_syncing = False  # whether a weight sync was running, which has the deadline then


def find_missed_deadline_s(answer: "asyncio.Future[Any]", timeout_s: float) -> float:
    """Return the deadline in seconds that a finished request of `FleetWorker.answers` missed; 0: none."""
    if answer.cancelled():
        return timeout_s
    error = answer.exception()
    if isinstance(error, RequestTimedOut) and not error.was_syncing:
        return error.timeout_s
    return 0.0


def _start_request(request: Any) -> "asyncio.Future[Any]":
    """Return the future answer of an ObjectRef, or of a coroutine, which this starts."""
    if asyncio.iscoroutine(request):
        # No task: it is not `cancelled()` right after `cancel()`, by which the fleet knows late requests.
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, asyncio.get_running_loop()))
    return asyncio.wrap_future(request.future())


def _cancel_request(request: Any) -> None:
    """Cancel a request on its worker. A coroutine makes several calls, and cancels them itself."""
    if asyncio.iscoroutine(request):
        return
    with contextlib.suppress(RayActorError):
        ray.cancel(request)


class Notifier:
    """Wake up all waiting coroutines, each in its own event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait(self, *others: "asyncio.Future[Any]", timeout_s: float | None = None) -> bool:
        """Wait for `notify` or one of the other futures; return False after a timeout."""
        notified = asyncio.get_running_loop().create_future()
        self._waiting.add(notified)
        try:
            done, _ = await asyncio.wait([notified, *others], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            self._waiting.discard(notified)

    def notify(self) -> None:
        for notified in self._waiting:
            if not notified.done():
                notified.set_result(None)


class FleetWorker:
    """A worker from its placement request to its end. Its fleet decides; this class executes."""

    def __init__(self, name: str, placement_group: PlacementGroup, config: EngineConfig) -> None:
        self.name = name
        self.placement_group: PlacementGroup | None = placement_group  # None: it was given to others
        self._config = config
        self.handle: Any = None  # None until the placement group is ready
        self.starting: Any = None  # reference to the result of its start
        self.health = Health(since=time.monotonic())
        self.load = 0  # sequences that were sent to it and are not finished
        self.version: int | None = None  # version of its weights
        self.has_begun_update = False  # whether a weight sync has begun to change the weights that it loaded
        self.restart_times: tuple[float, ...] = ()  # restarts of itself and its predecessors of the same name
        self.predecessor_reason = ""  # why its predecessor was lost
        self.lost_at: float | None = None  # when its predecessor was lost, until it serves
        self.has_warned = False  # that it waits for a placement
        self.capacity = 1.0  # as a share of the largest of the fleet
        self.syncing = False  # its engine is paused, or its weights are not verified: no checks, no valid answers
        self._check: Any = None
        self._checked_at = time.monotonic()
        self._num_interrupts = 0
        self._changed = Notifier()  # `syncing` or the number of interrupts
        self._catching_up: asyncio.Future[None] | None = None

    def start_process(self, actor: Any, arguments: Mapping[str, Any]) -> None:
        """Start the process in its placement group."""
        assert self.placement_group is not None, "it is ready"
        options = placement.actor_options(self._config, self.placement_group)
        configured = actor.options(max_concurrency=MAX_CALLS, **options)
        self.handle = configured.remote(**arguments)
        self.starting = self.handle.start.remote()
        self.health = Health(since=time.monotonic())

    @property
    def restarts(self) -> int:
        """Return the number of predecessors of this worker."""
        return len(self.restart_times)

    def end_sync(self) -> None:
        """Resume requests and health checks after a sync, once the state of the worker is set."""
        self.syncing = False
        self._changed.notify()

    def poll_health_check(self, now: float) -> bool:
        """Send a health check when one is due; return whether the worker has passed one since the last call.

        Raises:
            TimeoutError: No answer within check_timeout_s; other errors as `ray.get`.
        """
        health = self._config.health
        if self.syncing:
            self._check = None
        elif self._check is None:
            at_once = self.health.suspect and self.health.failed_checks == 0
            if now - self._checked_at >= health.check_interval_s or at_once:
                self._check = self.handle.check_health.remote()
                self._checked_at = now
        elif ray.wait([self._check], timeout=0)[0]:
            check = self._check
            self._check = None
            ray.get(check)
            return True
        elif now - self._checked_at > health.check_timeout_s:
            self._check = None
            raise TimeoutError
        return False

    async def answers(
        self,
        submits: Mapping[int, Callable[[Any], Any]],
        timeout_s: float,
        leave: "Callable[[FleetWorker], None]",
        on_answer: Callable[[int, Any], None],
    ) -> list["asyncio.Future[Any]"]:
        """Return the answers once no weight sync is running, since the weights that made them may be refused.

        Requests that time out are returned as cancelled futures, or raise `RequestTimedOut` themselves.

        Args:
            submits: The requests by number; each returns an ObjectRef, or a coroutine that makes several calls.
            leave: Called with this worker for each request that ends.
            on_answer: Called with number and answer of each request that ends while no weight sync is running.

        Raises:
            Interrupted: The worker stopped serving.
        """
        deadline = time.monotonic() + timeout_s
        num_interrupts = self._num_interrupts
        requests: list[tuple[Any, asyncio.Future[Any]]] = []

        def settle(number: int, answer: "asyncio.Future[Any]") -> None:
            leave(self)
            error = None if answer.cancelled() else answer.exception()
            if isinstance(error, RequestTimedOut):
                error.was_syncing = self.syncing
            if not (answer.cancelled() or error or self.syncing):
                on_answer(number, answer.result())

        try:
            for number, submit in submits.items():
                request = submit(self.handle)
                answer = _start_request(request)
                requests.append((request, answer))
                answer.add_done_callback(partial(settle, number))
            answers = [answer for _, answer in requests]
            all_done = asyncio.gather(*answers, return_exceptions=True)
            while self._num_interrupts == num_interrupts:
                if not all_done.done():
                    remaining_s = max(0.0, deadline - time.monotonic())
                    if await self._changed.wait(all_done, timeout_s=remaining_s):
                        continue
                    if not self.syncing:
                        return answers
                    break
                if self.syncing:  # the sync has the deadline
                    await self._changed.wait()
                else:
                    return answers
            raise Interrupted
        finally:
            for request, answer in requests:
                if not answer.done():
                    answer.cancel()
                    _cancel_request(request)
            for _ in range(len(submits) - len(requests)):
                leave(self)

    def interrupt(self) -> None:
        """Send the waiting requests to other workers."""
        self._num_interrupts += 1
        self._changed.notify()

    def start_catch_up(self, catch_up: "Callable[[FleetWorker], Coroutine[Any, Any, None]]") -> None:
        """Start to bring the worker the current weights, unless this is already running."""
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.ensure_future(catch_up(self))

    def dismissal_order(self) -> tuple[bool, bool, bool, int]:
        """Return a sort key: first workers without a placement, not serving, suspect, with a small load."""
        is_placed = self.handle is not None
        is_serving = self.health.state is State.SERVING
        return is_placed, is_serving, not self.health.suspect, self.load

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": str(self.health.state),
            "version": self.version,
            "reason": self.health.reason,
            "restarts": self.restarts,
            "restarts_left": restarts_left(self.restart_times, now=time.monotonic(), config=self._config.health),
            "load": self.load,
        }

    def remove(self) -> None:
        """Kill the process and remove the placement group."""
        self.interrupt()
        if self._catching_up is not None:
            self._catching_up.cancel()
        if self.handle is not None:
            ray.kill(self.handle, no_restart=True)
        self.yield_placement()

    def yield_placement(self) -> None:
        """Remove the placement group, so that others can have its resources. Safe to call twice."""
        if self.placement_group is not None:
            remove_placement_group(self.placement_group)
            self.placement_group = None
