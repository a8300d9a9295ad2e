"""The driver's side of the workers of one role.

Each worker has its own placement group, is replaced when it is lost, and can join or leave while requests run. Requests
are balanced, and each wait has a deadline. This module does not know what the workers do. `actors.fleet.health` decides
the state of a worker. All code runs on the driver's event loop, so that no lock is needed.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError, RayTaskError

from actors.cluster import placement
from actors.cluster.fanout import first_line
from actors.fleet.admission import QUEUE, Admission
from actors.fleet.fleet_worker import (
    DIED,
    UNREACHABLE,
    FleetWorker,
    Interrupted,
    RequestTimedOut,
    describe_error,
    describe_loss,
    find_missed_deadline_s,
    unwrap_error,
)
from actors.fleet.health import Event, State, apply_event, describe_overdue, restarts_left
from actors.fleet.meter import EngineStats, summary
from t2g.config import EngineConfig
from t2g.errors import RunStopped, SamplingFailed, Stopped, UserError

logger = logging.getLogger(__name__)

TICK_S = 0.5  # between two ticks
MEASURE_S = 2.0  # timeout of the engines' statistics
MAX_LOSSES = 6  # losses that the error at the end of a run lists
CatchUp = Callable[[FleetWorker], Coroutine[Any, Any, None]]  # brings a STALE worker the current weights
REQUEST_TRIES = 3  # attempts of one request, each on another worker if there is one


class _Answers:
    """The final answers to several requests."""

    def __init__(self, num_requests: int, on_answer: Callable[[Any], None] | None) -> None:
        self._num_requests = num_requests
        self._on_answer = on_answer
        self._answers: dict[int, Any] = {}  # by the number of the request

    def keep(self, number: int, answer: Any) -> None:
        """Keep the first answer to a request."""
        if number in self._answers:
            return
        self._answers[number] = answer
        if self._on_answer:
            self._on_answer(answer)

    def find_missing(self) -> list[int]:
        """Return the numbers of the requests without an answer."""
        return [number for number in range(self._num_requests) if number not in self._answers]

    def in_order(self) -> list[Any]:
        return [self._answers[number] for number in range(self._num_requests)]


class Fleet:
    """`config.workers.initial` actors of one class. Call `wait_ready` before the first request and `close` at the end.

    A worker has the methods `start`, `check_health`, which answers while the worker works, and `measure`, which returns
    `EngineStats`.
    """

    role: ClassVar[str]
    actor: ClassVar[Any]

    def __init__(self, arguments: Mapping[str, Any], config: EngineConfig, *, placement_timeout_s: float) -> None:
        self.config = config
        self._arguments = arguments
        self._placement_timeout_s = placement_timeout_s
        self._replacement_timeout_s = placement_timeout_s + config.start_timeout_s
        self.catch_up: CatchUp | None = None  # if None, a worker serves the weights that it loaded
        self.target_size = config.workers.initial
        self.is_ready = False  # whether `wait_ready` has returned
        self.started_with: Any = None  # the result of the workers' `start`, the same for all
        self._workers: list[FleetWorker] = []
        self._unreplaced: list[FleetWorker] = []  # lost workers that wait for their restart budget
        self._history: deque[str] = deque(maxlen=MAX_LOSSES)  # the last losses, for the error at the end of a run
        self._failure: RunStopped | None = None  # failure of a catch-up; the next tick raises it
        self._numbers = iter(range(1_000_000))
        room = math.ceil((1 + QUEUE) * config.max_num_seqs)
        self._admission = Admission(self._workers, room=room, on_waiting=self._watch_waiting)
        self._ticked_at = 0.0
        self._start_error: Exception | None = None  # error of the last start that failed, while no worker has started
        self._has_started = False  # whether any worker has started
        self._short_since: float | None = None  # since when fewer workers than workers.min have started
        self._recoveries: list[float] = []  # seconds from a loss until its successor serves, not yet reported
        self._restarts = 0
        for placement_group in placement.reserve({self.role: config}, timeout_s=placement_timeout_s):
            self._add(placement_group).start_process(self.actor, self._arguments)

    @property
    def fleet(self) -> "Fleet":
        """Return the fleet of a feedback source (`t2g.interfaces.FeedbackSource`)."""
        return self

    # ------------------------------------------------------------------------------------------------- for the jobs
    def wait_ready(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until every engine has started.

        Raises:
            UserError: The model cannot be served.
            RunStopped: Fewer than workers.min engines start in time.
            Stopped: `should_stop` holds.
        """
        deadline = time.monotonic() + self.config.start_timeout_s
        while self.is_starting and time.monotonic() < deadline:
            if should_stop():
                raise Stopped
            self.tick()
            time.sleep(TICK_S / 10)
        if len(self.started()) < self.config.workers.min:
            raise self._too_few()
        self.is_ready = True

    @property
    def is_starting(self) -> bool:
        """Return whether a worker waits for its placement or loads its model."""
        return any(worker.health.state is State.STARTING for worker in self._workers)

    async def supervise(self) -> None:
        """Call `tick` until cancelled. Raises RunStopped as `tick`, LearnerLost as `catch_up`."""
        self._failure = self._short_since = None  # the learner may have been restarted since the last call
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def set_target_size(self, number: int) -> None:
        """Set the number of workers. Surplus workers finish their requests; new ones join when they are ready."""
        if number != self.target_size or self._unreplaced:
            logger.warning("%s workers: target size %d, was %d", self.role, number, self.target_size)
            self.target_size = number
            self._unreplaced = []  # a new target size does not wait for restart budgets

    def yield_placements(self) -> None:
        """Remove the placement groups in which no process was started; the next tick requests them again.

        With an autoscaler they stay: it adds nodes for all that wait.
        """
        waiting = [worker for worker in self._workers if worker.handle is None]
        if not waiting or placement.may_grow():
            return
        for worker in waiting:
            worker.yield_placement()

    def serving(self) -> list[FleetWorker]:
        return [worker for worker in self._workers if worker.health.state is State.SERVING]

    def started(self) -> list[FleetWorker]:
        """Return the workers with a loaded model that are not leaving: the workers of a weight sync."""
        return [worker for worker in self._workers if worker.health.state in (State.STALE, State.SERVING)]

    @property
    def expected(self) -> int:
        """Return the target size without the workers that wait for their restart budget."""
        return self.target_size - len(self._unreplaced)

    @property
    def joining(self) -> bool:
        return any(worker.health.state in (State.STARTING, State.STALE) for worker in self._workers)

    def report(self) -> dict[str, Any]:
        """Return the fleet as JSON, for status.json, with lost workers that wait for their restart budget."""
        workers = [worker.report() for worker in (*self._workers, *self._unreplaced)]
        return {
            "role": self.role,
            "target_size": self.target_size,
            "restart_window_s": self.config.health.restart_window_s,
            "workers": workers,
        }

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: idle share of engine time, losses, the longest recovery."""
        metrics = {"workers": float(len(self.serving())), "restarts": float(self._restarts)}
        if self._recoveries:
            metrics["recovery_s"] = max(self._recoveries)
        self._recoveries = []
        self._restarts = 0
        metrics["idle"] = self._admission.idle.share(self._workers, time.monotonic())
        return metrics

    async def engine_metrics(self) -> dict[str, float]:
        """Return the engines' own statistics since the last call, and update the workers' capacities.

        Engines that do not answer within MEASURE_S are left out.
        """
        workers = [worker for worker in self.serving() if worker.health.reachable]
        refs = [worker.handle.measure.remote() for worker in workers]
        answers = [asyncio.wrap_future(ref.future()) for ref in refs]
        if answers:
            await asyncio.wait(answers, timeout=MEASURE_S)

        measured: list[tuple[FleetWorker, EngineStats]] = []
        for worker, answer in zip(workers, answers, strict=True):
            answer.cancel()
            if not answer.cancelled() and answer.exception() is None:
                measured.append((worker, answer.result()))
        max_tokens = max((stats.cache_tokens for _, stats in measured), default=0)
        for worker, stats in measured:
            worker.capacity = stats.cache_tokens / max_tokens if stats.cache_tokens else 1.0
        return summary([stats for _, stats in measured])

    def clear_cache(self) -> None:
        """Drop cached answers, in a fleet that has any."""

    def close(self) -> None:
        """End every worker; their engine cores end with them."""
        for worker in self._workers:
            worker.remove()
        self._workers.clear()

    # ------------------------------------------------------------------------------------------------- for requests
    async def call(self, submit: Callable[[Any], Any], *, timeout_s: float, what: str) -> Any:
        """Return the answer to one request, as `calls`."""
        (answer,) = await self.calls([submit], timeout_s=timeout_s, what=what)
        return answer

    async def calls(
        self,
        submits: Sequence[Callable[[Any], Any]],
        *,
        timeout_s: float,
        what: str,
        on_answer: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Send each `submit(worker)` to the least loaded worker, and return the answers in order.

        Requests that this worker does not answer, because it dies, times out or loses its weights, go to another one. A
        worker that failed is avoided until it answers a call. All requests are assigned to one worker together; the
        deadline starts once it has room.

        Args:
            on_answer: Called once with each answer as soon as it is final: a later loss of the worker keeps it.

        Raises:
            SamplingFailed: No answer after REQUEST_TRIES attempts.
            RunStopped: No worker is left.
            UserError: The worker raised it.
        """
        answers = _Answers(len(submits), on_answer)
        reasons: list[str] = []
        worker: FleetWorker | None = None
        for _ in range(REQUEST_TRIES):
            self._tick_if_due(time.monotonic())  # not every job calls `supervise`
            open_ = answers.find_missing()
            worker = await self._admission.enter(len(open_), avoid=worker)
            try:
                requests = {number: submits[number] for number in open_}
                futures = await worker.answers(requests, timeout_s, self._admission.leave, answers.keep)
                failures = [self._explain_failure(worker, future, timeout_s) for future in futures]
            except Interrupted:
                futures = []
                failures = [f"{worker.name} {worker.health.reason or 'stopped serving'}"]
            for number, future, failure in zip(open_, futures, failures, strict=False):
                if not failure:
                    answers.keep(number, future.result())
            if not answers.find_missing():
                if futures:
                    self._apply_event(worker, "request_answered")
                return answers.in_order()
            reason = next(filter(None, failures))
            reasons.append(reason)
            late_s = max((find_missed_deadline_s(future, timeout_s) for future in futures), default=0.0)
            if late_s:  # several late requests count as one failure
                logger.warning("%s: %s", what, reason)
                self._apply_event(worker, "request_failed", f"did not answer within {late_s:g} s")
        raise SamplingFailed(f"{what}: {'; '.join(reasons)}")

    def _explain_failure(self, worker: FleetWorker, answer: "asyncio.Future[Any]", timeout_s: float) -> str:
        """Return why a request has no answer, "" if it has one. Raises the worker's UserError or RunStopped."""
        if answer.cancelled():
            return f"no answer from {worker.name} within {timeout_s:g} s"
        error = answer.exception()
        if isinstance(error, RequestTimedOut):
            return f"no answer from {worker.name} within {error.timeout_s:g} s"
        if isinstance(error, RayTaskError):
            raised = unwrap_error(error)
            if isinstance(raised, UserError | RunStopped):
                raise raised from None
            return f"{worker.name} failed: {first_line(raised)}"
        if isinstance(error, DIED):
            self.record_failure(worker, error)
            return f"{worker.name} {describe_loss(error)}"
        if isinstance(error, RayError):
            return f"{worker.name} failed: {describe_error(error)}"
        if error is not None:
            raise error
        return ""

    async def _watch_waiting(self) -> None:
        """While requests wait, admit them to workers that start or recover, and fail if none does in time."""
        reached_at = time.monotonic()
        while self._admission.waiting:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            try:
                self._tick_if_due(now)
                self._admission.admit()
                if any(worker.health.reachable for worker in self.serving()):
                    reached_at = now
                elif now - reached_at > self._replacement_timeout_s:
                    key = "cluster.placement_timeout_s + start_timeout_s"
                    limit = f"within {key}={self._replacement_timeout_s:g}"
                    raise RunStopped(f"no {self.role} worker became ready {limit}: {self.describe_workers()}")
            except Exception as error:  # noqa: BLE001 - the waiting request raises it
                self._admission.refuse(error)

    # ------------------------------------------------------------------------------------------------- supervision
    def _tick_if_due(self, now: float) -> None:
        if now - self._ticked_at >= TICK_S:
            self.tick()

    def tick(self) -> None:
        """Check and replace workers, without waiting. Raises RunStopped if fewer than workers.min are left."""
        if self._failure is not None:
            raise self._failure
        now = time.monotonic()
        self._ticked_at = now
        self._admission.idle.account(self._workers, now)
        for worker in list(self._workers):
            self._supervise_worker(worker, now)
        restartable = [worker for worker in self._unreplaced if self._should_restart(worker)]
        for worker in restartable:
            self._unreplaced.remove(worker)
            self._add(placement.request_placement(self.config, self.role), predecessor=worker)
        self._resize()
        self._check_min_workers(now)

    def _supervise_worker(self, worker: FleetWorker, now: float) -> None:
        if worker.handle is None:
            if worker.placement_group is None:
                worker.placement_group = placement.request_placement(self.config, self.role)
            elif placement.is_ready(worker.placement_group):
                worker.start_process(self.actor, self._arguments)
            elif not worker.has_warned and now - worker.health.since > self._placement_timeout_s:
                worker.has_warned = True
                requirements = placement.describe_requirements(self.config)
                logger.warning("%s waits for a placement: %s", worker.name, requirements)
            return
        if worker.health.state is State.STARTING:
            self._check_start(worker)
        else:
            self._check_health(worker, now)
        overdue = describe_overdue(worker.health, now=now, config=self.config)
        if overdue:
            self._apply_event(worker, "died", overdue)
        elif worker.health.state is State.DRAINING and worker.load == 0:
            self._apply_event(worker, "drained", "left")
        elif worker.health.state is State.STALE and worker.health.reachable and self.catch_up is not None:
            worker.start_catch_up(self._catch_up)

    async def _catch_up(self, worker: FleetWorker) -> None:
        assert self.catch_up is not None
        try:
            await self.catch_up(worker)
        except RunStopped as error:
            self._failure = error

    def _check_start(self, worker: FleetWorker) -> None:
        done, _ = ray.wait([worker.starting], timeout=0)
        if not done:
            return
        try:
            self.started_with = ray.get(worker.starting)
        except DIED as error:
            self._apply_event(worker, "died", f"died in its start ({describe_error(error)})")
        except RayTaskError as error:
            raised = unwrap_error(error)
            if not self._has_started:
                self._start_error = raised if isinstance(raised, UserError | RunStopped) else error  # has a traceback
            self._apply_event(worker, "died", f"could not start ({first_line(raised)})")
        except RayError as error:  # Ray could not start the process, for example set up its environment
            reason = f"could not start ({describe_error(error)})"
            if not self._has_started:
                self._start_error = RunStopped(f"{worker.name} {reason}")
            self._apply_event(worker, "died", reason)
        else:
            self._has_started = True
            self._start_error = None
            self._apply_event(worker, "started")
            if self.catch_up is None:
                self._apply_event(worker, "weights_verified")

    def _check_health(self, worker: FleetWorker, now: float) -> None:
        try:
            if worker.poll_health_check(now):
                self._apply_event(worker, "check_passed")
        except TimeoutError:
            limit_s = self.config.health.check_timeout_s
            self._apply_event(worker, "check_failed", f"did not answer a health check within {limit_s:g} s")
        except (RayTaskError, *UNREACHABLE) as error:
            self._apply_event(worker, "check_failed", f"failed a health check ({describe_error(error)})")
        except DIED as error:
            self.record_failure(worker, error)
        except RayError as error:
            self._apply_event(worker, "check_failed", f"failed a health check ({describe_error(error)})")

    def _apply_event(self, worker: FleetWorker, event: Event, reason: str = "") -> None:
        """Update the health of a worker after an event, and act on its new state."""
        before = worker.health.state
        now = time.monotonic()
        worker.health = apply_event(worker.health, event, now=now, config=self.config.health, reason=reason)
        state = worker.health.state
        if state is before:
            return
        if state is State.SERVING:
            if worker.lost_at is not None:
                self._recoveries.append(now - worker.lost_at)
                worker.lost_at = None
            self._admission.admit()
        if state is State.STALE:
            worker.interrupt()
        if state is State.DEAD:
            self._remove(worker, is_replaced=before is not State.DRAINING and event != "dismissed")

    def _remove(self, worker: FleetWorker, *, is_replaced: bool) -> None:
        """Kill a worker: if it came back, it would serve old weights. `is_replaced`: it gets a successor."""
        self._workers.remove(worker)
        worker.remove()
        if not is_replaced:
            return
        self._restarts += 1
        self._history.append(f"{worker.name} {worker.health.reason}")
        logger.warning("%s %s; %d left", worker.name, worker.health.reason, len(self.started()))
        self._unreplaced.append(worker)

    def _should_restart(self, worker: FleetWorker) -> bool:
        """Return whether a lost worker gets a successor now.

        If a second start is refused for the same reason while no worker has started, the config is at fault.
        """
        if isinstance(self._start_error, UserError) and worker.health.reason == worker.predecessor_reason:
            return False
        num_left = restarts_left(worker.restart_times, now=time.monotonic(), config=self.config.health)
        return num_left > 0

    def record_failure(self, worker: FleetWorker, error: Exception) -> None:
        """Record that a call of the worker ended in an error of DIED."""
        event = "unreachable" if isinstance(error, UNREACHABLE) else "died"
        self._apply_event(worker, event, f"{describe_loss(error)} ({describe_error(error)})")

    def record_verified(self, worker: FleetWorker, version: int) -> None:
        """Record that the worker verified this version: it serves."""
        worker.version = version
        self._apply_event(worker, "weights_verified")
        worker.end_sync()

    def record_missed_sync(self, worker: FleetWorker, reason: str, *, timed_out: bool = False) -> None:
        """Record a missed weight sync: the worker is STALE, and its requests go to other workers.

        Args:
            timed_out: Whether it did not answer in time; it is then unreachable until it passes a health check.
        """
        logger.warning("%s missed a weight sync: %s", worker.name, reason)
        if timed_out:
            self._apply_event(worker, "unreachable", reason)
        self._apply_event(worker, "sync_missed", f"missed a weight sync ({reason})")
        worker.end_sync()

    def record_aborted_sync(self, worker: FleetWorker, reason: str) -> None:
        """Record a sync that ended for a reason that is not the worker's: it becomes STALE without a counted miss."""
        logger.warning("%s missed a weight sync: %s", worker.name, reason)
        self._apply_event(worker, "sync_aborted", f"missed a weight sync ({reason})")
        worker.end_sync()

    def _resize(self) -> None:
        """Add or dismiss workers towards the target size."""
        living = [worker for worker in self._workers if worker.health.state is not State.DRAINING]
        for _ in range(self.expected - len(living)):
            self._add(placement.request_placement(self.config, self.role))
        num_surplus = max(0, len(living) - self.target_size)
        for worker in sorted(living, key=FleetWorker.dismissal_order)[:num_surplus]:
            if not worker.syncing:  # its answers would count before its weights are verified; dismiss it later
                self._apply_event(worker, "dismissed", "was scaled down")

    def _add(self, placement_group: Any, *, predecessor: FleetWorker | None = None) -> FleetWorker:
        name = predecessor.name if predecessor else f"{self.role} worker {next(self._numbers)}"
        worker = FleetWorker(name, placement_group, self.config)
        if predecessor:
            now = time.monotonic()
            worker.restart_times = (*predecessor.restart_times, now)
            worker.lost_at = predecessor.lost_at or now
            worker.predecessor_reason = predecessor.health.reason
        self._workers.append(worker)
        return worker

    def _check_min_workers(self, now: float) -> None:
        """Raise RunStopped, or the error of a worker's start, if fewer than workers.min are left."""
        minimum = min(self.config.workers.min, self.target_size)
        num_starting = sum(worker.health.state is State.STARTING for worker in self._workers)
        num_started = len(self.started())
        if num_started >= minimum:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = now
        if num_started + num_starting < minimum or now - self._short_since > self._replacement_timeout_s:
            raise self._too_few()

    def _too_few(self) -> Exception:
        if self._start_error is not None:
            return self._start_error
        num_left = len(self.started())
        noun = "workers are" if num_left > 1 else "worker is"
        left = f"{num_left or 'no'} {self.role} {noun} left"
        section = "rollout" if self.role == "rollout" else "feedback.engine"
        minimum = f"{section}.workers.min={self.config.workers.min}"
        return RunStopped(f"{left}, {minimum}: {self.describe_workers()}")

    def describe_workers(self) -> str:
        """Describe the lost workers with their reasons, and the state of the others."""
        living = [f"{worker.name} is {worker.health.state}" for worker in self._workers]
        return "; ".join([*self._history, *living])
