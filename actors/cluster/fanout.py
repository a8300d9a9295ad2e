"""One call to several actors: all results, or one sentence that says which actor failed, died or is late."""

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from t2g.errors import LearnerLost, RunStopped, UserError

# After a failure, how long to look for its cause: a dead peer breaks connections elsewhere first, and a whole node that
# is gone is told of only after some seconds.
GRACE_S = 10.0


def collect(refs: Sequence["ray.ObjectRef[Any]"], *, who: str, call: str, timeout_s: float) -> list[Any]:
    """Results in order. `who` and the position name an actor, `call` names the request.

    Raises UserError or RunStopped as an actor raised it; LearnerLost when one died or did not answer within timeout_s,
    RunStopped when one raised anything else. Of several failures, a dead actor is reported first, then an error of t2g.
    """
    refs = list(refs)
    deadline = time.monotonic() + timeout_s
    values: dict[ray.ObjectRef[Any], Any] = {}
    pending = refs
    while pending:
        done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
        if not done:
            late = ", ".join(str(i) for i, ref in enumerate(refs) if ref in pending)
            raise LearnerLost(f"{who} {late} is late: {call} did not finish within {timeout_s:g} s")
        values[done[0]], error = _outcome(done[0])
        if error:
            finished, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S, fetch_local=False)
            failures = [(i, e) for i, ref in enumerate(refs) if ref in finished and (e := _outcome(ref)[1])]
            _raise(*min(failures, key=lambda failure: _rank_of_cause(failure[1])), who=who, call=call)
    return [values[ref] for ref in refs]


def any_failed(refs: Sequence["ray.ObjectRef[Any]"]) -> bool:
    """Whether one of them has ended in an error by now."""
    done = ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else []
    return any(_outcome(ref)[1] for ref in done)


def first_line(error: BaseException) -> str:
    """What an exception says, in its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def first_sentence(error: Exception) -> str:
    """The first sentence of vLLM's or pydantic's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "validation error" in lines[0]:
        lines = [line.removeprefix("Value error, ") for line in lines[1:]]
    return (lines or [type(error).__name__])[0].split(" [type=")[0].split(". ")[0]


def _outcome(ref: "ray.ObjectRef[Any]") -> tuple[Any, RayError | None]:
    try:
        return ray.get(ref), None
    except RayError as error:
        return None, error


def _rank_of_cause(error: RayError) -> int:
    if isinstance(error, RayTaskError):
        return 1 if isinstance(error.cause, (UserError, RunStopped)) else 2
    return 0


def _raise(index: int, error: RayError, *, who: str, call: str) -> NoReturn:
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, (UserError, RunStopped)):
            raise type(cause)(str(cause)) from error
        raise RunStopped(f"{who} {index} failed in {call}: {first_line(cause)}") from cause
    what = "died" if isinstance(error, RayActorError) else "was lost"
    raise LearnerLost(f"{who} {index} {what} during {call}: {first_line(error)}") from error
