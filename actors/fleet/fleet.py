"""The workers of one role as their driver sees them: each with a place of its own, replaced when it is lost, joining
and leaving while requests go on, loaded evenly, each wait with a deadline.

Knows nothing of what the workers do. Events of a worker go to `actors.fleet.health`, which decides its
state. All of it runs on the driver's event loop: nothing here needs a lock.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

import ray
from ray.exceptions import RayTaskError

from actors.cluster import placement
from actors.cluster.fanout import first_line
from actors.fleet.admission import QUEUE, Admission
from actors.fleet.health import Event, State, after, overdue, restarts_left
from actors.fleet.member import DIED, UNREACHABLE, Interrupted, Member, cause, fate, why
from actors.fleet.meter import summary
from t2g.config import EngineConfig
from t2g.errors import RunStopped, SamplingFailed, UserError

logger = logging.getLogger(__name__)

TICK_S = 0.5  # between two rounds of care
MEASURE_S = 2.0  # for the engines' numbers
MAX_LOSSES = 6  # losses that the last sentence of a run tells of
CatchUp = Callable[[Member], Coroutine[Any, Any, None]]  # brings a STALE worker the current weights
TRIES = 3  # of one request, each on another worker where there is one


class Fleet:
    """Starts `config.workers.initial` actors of one class. `wait_ready` before the first request; `close` at the end.

    Of a worker's methods it calls `start`, `probe`, whose answer says that the worker works, and `measure`, which
    returns a `EngineStats`.
    """

    role: ClassVar[str]
    actor: ClassVar[Any]

    def __init__(self, arguments: Mapping[str, Any], config: EngineConfig, *, placement_timeout_s: float) -> None:
        self.config, self._arguments = config, arguments
        self._placement_timeout_s = placement_timeout_s
        self._patience_s = placement_timeout_s + config.start_timeout_s  # what a successor takes: a place, a start
        self.catch_up: CatchUp | None = None  # without one, a worker serves the weights that it loaded
        self.wanted = config.workers.initial
        self.started_with: Any = None  # what the workers' `start` returned, the same for all
        self._members: list[Member] = []
        self._given_up: list[Member] = []  # lost workers without a successor, while their restart budget is used up
        self._history: deque[str] = deque(maxlen=MAX_LOSSES)  # the last losses, for the sentence that ends a run
        self._failure: RunStopped | None = None  # of a catch-up, for the next round of care to raise
        self._numbers = iter(range(1_000_000))
        room = math.ceil((1 + QUEUE) * config.max_num_seqs)
        self._admission = Admission(self._members, room=room, care=self._watch)
        self._ticked_at = 0.0
        self._start_error: Exception | None = None  # of the last start that failed, while no worker has started
        self._has_started = False  # whether any worker has started
        self._short_since: float | None = None  # since when fewer workers than the floor have started
        self._recoveries: list[float] = []  # seconds from a loss to its successor's service, not yet reported
        self._restarts = 0
        for place in placement.reserve({self.role: config}, timeout_s=placement_timeout_s):
            self._add(place).begin(self.actor, self._arguments)

    @property
    def fleet(self) -> "Fleet":
        """What looks after the workers of a feedback source (`t2g.interfaces.FeedbackSource`)."""
        return self

    # ------------------------------------------------------------------------------------------------- for the jobs
    def wait_ready(self) -> None:
        """Until every engine has started.

        Raises UserError for a model that cannot be served, RunStopped when fewer than the floor start in time.
        """
        deadline = time.monotonic() + self.config.start_timeout_s
        while any(m.health.state is State.STARTING for m in self._members) and time.monotonic() < deadline:
            self.tick()
            time.sleep(TICK_S / 10)
        if len(self.started()) < self.config.workers.min:
            raise self._too_few()

    async def supervise(self) -> None:
        """Rounds of care until cancelled. Raises RunStopped when the floor of workers cannot be held, LearnerLost as
        `catch_up` does."""
        self._failure = self._short_since = None  # since the last rounds a learner may have been made again
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def set_target_size(self, number: int) -> None:
        """So many workers from now on. Those too many finish what they have; new ones join when they are ready."""
        if number != self.wanted or self._given_up:
            logger.warning("%s workers: %d wanted, was %d", self.role, number, self.wanted)
            self.wanted = number
            self._given_up = []  # who asks for workers gets them, whatever became of earlier ones

    def serving(self) -> list[Member]:
        return [m for m in self._members if m.health.state is State.SERVING]

    def started(self) -> list[Member]:
        """Those with a loaded model that are not leaving: what a weight sync is for."""
        return [m for m in self._members if m.health.state in (State.STALE, State.SERVING)]

    @property
    def expected(self) -> int:
        """Workers that are wanted and were not given up."""
        return self.wanted - len(self._given_up)

    @property
    def joining(self) -> bool:
        return any(m.health.state in (State.STARTING, State.STALE) for m in self._members)

    def report(self) -> dict[str, Any]:
        """The fleet as JSON, for status.json."""
        return {"role": self.role, "wanted": self.wanted, "workers": [m.report() for m in self._members]}

    def metrics(self) -> dict[str, float]:
        """Since the last call: the share of engine time without a request, losses, the longest recovery."""
        found = {"workers": float(len(self.serving())), "restarts": float(self._restarts)}
        if self._recoveries:
            found["recovery_s"] = max(self._recoveries)
        self._recoveries, self._restarts = [], 0
        return found | {"idle": self._admission.idle.share(self._members, time.monotonic())}

    async def measured(self) -> dict[str, float]:
        """What the engines themselves say of the time since the last call; who does not answer at once is left out.

        Tells admission how much each has room for.
        """
        members = [m for m in self.serving() if m.health.reachable]
        requests = [asyncio.wrap_future(m.handle.measure.remote().future()) for m in members]
        if requests:
            await asyncio.wait(requests, timeout=MEASURE_S)
        for answer in requests:
            answer.cancel()
        here = [(m, a) for m, a in zip(members, requests, strict=True) if not a.cancelled()]
        answers = [(m, a.result()) for m, a in here if a.exception() is None]
        most = max((measured.cache_tokens for _, measured in answers), default=0)
        for member, measured in answers:
            member.capacity = measured.cache_tokens / most if measured.cache_tokens else 1.0
        return summary([measured for _, measured in answers])

    def close(self) -> None:
        """End every worker; their engine cores end with them."""
        for member in self._members:
            member.remove()
        self._members.clear()

    # ------------------------------------------------------------------------------------------------- for requests
    async def call(self, submit: Callable[[Any], Any], *, timeout_s: float, what: str) -> Any:
        """`submit(worker)`: `calls` of one."""
        (answer,) = await self.calls([submit], timeout_s=timeout_s, what=what)
        return answer

    async def calls(self, submits: Sequence[Callable[[Any], Any]], *, timeout_s: float, what: str) -> list[Any]:
        """Each `submit(worker)` on the least loaded worker, in their order; on others what that one does not answer
        because it dies, is late or loses its weights. A worker that failed is passed over until it answers something.

        They enter together, where one has room, and each gives its room back when it ends. Who finds no room waits
        here, before the deadline starts.

        Raises SamplingFailed after TRIES tries, RunStopped when no worker is left, and the worker's own UserError.
        """
        answers: dict[int, Any] = {}
        reasons: list[str] = []
        member: Member | None = None
        for _ in range(TRIES):
            if time.monotonic() - self._ticked_at >= TICK_S:  # it may be the only caller: not every job supervises
                self.tick()
            left = [number for number in range(len(submits)) if number not in answers]
            member = await self._admission.enter(len(left), avoid=member)
            try:
                found = await member.answers([submits[number] for number in left], timeout_s, self._admission.leave)
            except Interrupted:
                reasons.append(f"{member.name} {member.health.reason or 'stopped serving'}")
                continue
            failures = [self._why_not(member, answer, timeout_s) for answer in found]
            answers |= {n: a.result() for n, a, why_not in zip(left, found, failures, strict=True) if not why_not}
            if len(answers) == len(submits):
                self._tell(member, "request_answered")
                return [answers[number] for number in range(len(submits))]
            reasons.append(next(filter(None, failures)))
            if any(answer.cancelled() for answer in found):  # however many are late, the worker was so once
                logger.warning("%s: %s", what, reasons[-1])
                self._tell(member, "request_failed", f"did not answer within {timeout_s:g} s")
        raise SamplingFailed(f"{what}: {'; '.join(reasons)}")

    def _why_not(self, member: Member, answer: "asyncio.Future[Any]", timeout_s: float) -> str:
        """Why there is no answer; "" where there is one. Raises what the worker says to the user."""
        if answer.cancelled():
            return f"no answer by {member.name} within {timeout_s:g} s"
        error = answer.exception()
        if isinstance(error, RayTaskError):
            raised = cause(error)
            if isinstance(raised, UserError | RunStopped):
                raise raised from None
            return f"{member.name} failed: {first_line(raised)}"
        if isinstance(error, DIED):
            self.failed(member, error)
            return f"{member.name} {fate(error)}"
        if error is not None:
            raise error
        return ""

    async def _watch(self) -> None:
        """While requests wait, what no answer tells: workers that come, are well again, or do not come at all."""
        reached_at = time.monotonic()
        while self._admission.waiting:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            try:
                if now - self._ticked_at >= TICK_S:
                    self.tick()
                self._admission.admit()
                if any(m.health.reachable for m in self.serving()):
                    reached_at = now
                elif now - reached_at > self._patience_s:
                    patience = f"within {self._patience_s:g} s"
                    raise RunStopped(f"no {self.role} worker came to serve {patience}: {self._words()}")
            except Exception as error:  # noqa: BLE001 - the waiting request raises it
                self._admission.refuse(error)

    # ------------------------------------------------------------------------------------------------------- care
    def tick(self) -> None:
        """One round of care; waits for nothing. Raises RunStopped when the floor of workers cannot be held."""
        if self._failure is not None:
            raise self._failure
        now = self._ticked_at = time.monotonic()
        self._admission.idle.account(self._members, now)
        for member in list(self._members):
            self._care(member, now)
        for member in [m for m in self._given_up if self._may_restart(m)]:
            self._given_up.remove(member)
            self._add(placement.ask(self.config), after=member)
        self._resize()
        self._check_floor(now)

    def _care(self, member: Member, now: float) -> None:
        if member.handle is None:
            if placement.is_ready(member.place):
                member.begin(self.actor, self._arguments)
            elif not member.warned and now - member.health.since > self._placement_timeout_s:
                member.warned = True
                logger.warning("%s waits for a place: %s", member.name, placement.wish(self.config))
            return
        if member.health.state is State.STARTING:
            self._see_start(member)
        else:
            self._see_probe(member, now)
        if late := overdue(member.health, now=now, config=self.config):
            self._tell(member, "died", late)
        elif member.health.state is State.DRAINING and member.load == 0:
            self._tell(member, "drained", "left")
        elif member.health.state is State.STALE and member.health.reachable and self.catch_up is not None:
            member.bring_up(self._bring_up)

    async def _bring_up(self, member: Member) -> None:
        assert self.catch_up is not None
        try:
            await self.catch_up(member)
        except RunStopped as error:
            self._failure = error

    def _see_start(self, member: Member) -> None:
        if not ray.wait([member.starting], timeout=0)[0]:
            return
        try:
            self.started_with = ray.get(member.starting)
        except DIED as error:
            self._tell(member, "died", f"died in its start ({why(error)})")
        except RayTaskError as error:
            raised = cause(error)
            if not self._has_started:
                self._start_error = raised if isinstance(raised, UserError | RunStopped) else error  # has a traceback
            self._tell(member, "died", f"could not start ({first_line(raised)})")
        else:
            self._has_started, self._start_error = True, None
            self._tell(member, "started")
            if self.catch_up is None:
                self._tell(member, "weights_verified")

    def _see_probe(self, member: Member, now: float) -> None:
        try:
            if member.probed(now):
                self._tell(member, "probe_answered")
        except TimeoutError:
            limit_s = self.config.health.probe_timeout_s
            self._tell(member, "probe_failed", f"did not answer a probe within {limit_s:g} s")
        except (RayTaskError, *UNREACHABLE) as error:
            self._tell(member, "probe_failed", f"failed a probe ({why(error)})")
        except DIED as error:
            self.failed(member, error)

    def _tell(self, member: Member, event: Event, reason: str = "") -> None:
        """What happened to a worker, and what follows from it."""
        before = member.health.state
        now, health = time.monotonic(), self.config.health
        member.health = after(member.health, event, now=now, config=health, reason=reason)
        state = member.health.state
        if state is before:
            return
        if state is State.SERVING:
            if member.lost_at is not None:
                self._recoveries.append(now - member.lost_at)
                member.lost_at = None
            self._admission.admit()
        if state in (State.STALE, State.DEAD) and before is not State.STARTING:
            member.interrupt()
        if state is State.DEAD:
            self._remove(member, wanted=before is not State.DRAINING and event != "dismissed")

    def _remove(self, member: Member, *, wanted: bool) -> None:
        """Kill it for good, as a worker that comes back would serve old weights; its successor waits for a place."""
        self._members.remove(member)
        member.remove()
        if not wanted:
            return
        self._restarts += 1
        self._history.append(f"{member.name} {member.health.reason}")
        logger.warning("%s %s; %d left", member.name, member.health.reason, len(self.started()))
        self._given_up.append(member)

    def _may_restart(self, member: Member) -> bool:
        """Return whether a lost worker gets a successor now.

        A second start that is refused for the same reason, while no worker has started, refuses the config itself.
        """
        if isinstance(self._start_error, UserError) and member.health.reason == member.predecessor_reason:
            return False
        return restarts_left(member.restart_times, now=time.monotonic(), config=self.config.health) > 0

    def failed(self, member: Member, error: Exception) -> None:
        """A call of it ended in one of DIED."""
        event = "unreachable" if isinstance(error, UNREACHABLE) else "died"
        self._tell(member, event, f"{fate(error)} ({why(error)})")

    def has_weights(self, member: Member, version: int) -> None:
        """The worker computes what the learner computes: it serves."""
        member.version = version
        self._tell(member, "weights_verified")
        member.sync_ended()

    def missed(self, member: Member, reason: str, *, late: bool = False) -> None:
        """Half a sync or none: the worker is STALE, and its requests go elsewhere. late: its probes decide."""
        logger.warning("%s missed a weight sync: %s", member.name, reason)
        if late:
            self._tell(member, "unreachable", reason)
        self._tell(member, "sync_missed", f"missed a weight sync ({reason})")
        member.sync_ended()

    def _resize(self) -> None:
        """Towards the wanted number."""
        living = [m for m in self._members if m.health.state is not State.DRAINING]
        for _ in range(self.expected - len(living)):
            self._add(placement.ask(self.config))
        for member in sorted(living, key=Member.dispensable)[: max(0, len(living) - self.wanted)]:
            if not member.syncing:  # else its answers would count before its weights are proved; later
                self._tell(member, "dismissed", "was not wanted any more")

    def _add(self, place: Any, *, after: Member | None = None) -> Member:
        name = after.name if after else f"{self.role} worker {next(self._numbers)}"
        member = Member(name, place, self.config)
        if after:
            now = time.monotonic()
            member.restart_times, member.lost_at = (*after.restart_times, now), after.lost_at or now
            member.predecessor_reason = after.health.reason
        self._members.append(member)
        return member

    def _check_floor(self, now: float) -> None:
        """Raises RunStopped, or the error of a worker's start, when fewer workers than the floor are left."""
        floor, coming = self.config.workers.min, sum(m.health.state is State.STARTING for m in self._members)
        have = len(self.started())
        if have >= min(floor, self.wanted):
            self._short_since = None
            return
        self._short_since = now if self._short_since is None else self._short_since
        if have + coming < min(floor, self.wanted) or now - self._short_since > self._patience_s:
            raise self._too_few()

    def _too_few(self) -> Exception:
        if self._start_error is not None:
            return self._start_error
        have = len(self.started())
        left = f"{have or 'no'} {self.role} worker{'s are' if have > 1 else ' is'} left"
        return RunStopped(f"{left}, workers.min={self.config.workers.min}: {self._words()}")

    def _words(self) -> str:
        """Who was lost and why, and what the others do."""
        living = [f"{m.name} is {m.health.state}" for m in self._members]
        return "; ".join([*self._history, *living])
