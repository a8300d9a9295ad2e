"""One call to several actors: all results, or one error that names the actor that failed, died or timed out."""

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from t2g.errors import LearnerLost, RankFailed, RunStopped, UserError

# How long to look for the cause of a failure: a dead actor breaks the connections of others first, and Ray reports a
# lost node only after some seconds.
GRACE_S = 10.0
# In errors of Ray, of torch on a CPU and on a GPU, and of Python.
SHORT_OF_MEMORY = r"OutOfMemory|OOM killer|out of memory|low on memory|can't allocate memory|MemoryError"

# A rank that has died breaks the connections of the others before Ray reports it; a GPU that has failed needs another.
LOST_CONNECTION = r"[Cc]onnection (closed|reset|refused)|NCCL|[Gg]loo|DistBackendError|DistNetworkError|CUDA error"


def collect(
    refs: Sequence["ray.ObjectRef[Any]"],
    *,
    actor_name: str,
    call: str,
    timeout_s: float,
    limit_s: float | None = None,
) -> list[Any]:
    """Return the results in order. Errors name an actor by `actor_name` and its position, and the request by `call`.

    Args:
        limit_s: The limit that the user set, for messages, if timeout_s is what is left of it.

    Raises:
        UserError: An actor raised it.
        RunStopped: An actor raised it, or any other error.
        RankFailed: An actor raised an error other than UserError, and others, which wait for it, have not answered.
        LearnerLost: An actor died or did not answer within timeout_s.

    A dead actor is reported first, then an error of t2g, then any other.
    """
    refs = list(refs)
    deadline = time.monotonic() + timeout_s
    values: dict[ray.ObjectRef[Any], Any] = {}
    pending = refs
    while pending:
        done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
        if not done:
            silent = ", ".join(str(index) for index, ref in enumerate(refs) if ref in pending)
            limit_s = timeout_s if limit_s is None else limit_s
            raise LearnerLost(f"{actor_name} {silent} timed out: {call} did not finish within {limit_s:g} s")
        value, error = _outcome(done[0])
        if error:
            failure = _find_cause(refs)
            _raise(failure, actor_name=actor_name, call=call)
        values[done[0]] = value
    return [values[ref] for ref in refs]


class _Failure(NamedTuple):
    """The failure that explains the others."""

    index: int  # position of the actor
    error: RayError
    has_waiting_actors: bool  # whether an actor has not answered


def _find_cause(refs: list["ray.ObjectRef[Any]"]) -> _Failure:
    """Return the failure that explains the others; at least one call has failed."""
    finished, pending = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S, fetch_local=False)
    failures: list[_Failure] = []
    for index, ref in enumerate(refs):
        if ref not in finished:
            continue
        _, error = _outcome(ref)
        if error:
            failure = _Failure(index, error, has_waiting_actors=bool(pending))
            failures.append(failure)
    return min(failures, key=lambda failure: _rank_of_cause(failure.error))


def is_short_of_memory(error: BaseException) -> bool:
    """Return whether an error, or what it is made from, may have been caused by too little memory.

    Ray names it as a possible cause wherever a process ended by a signal.
    """
    errors = [error]
    if error.__cause__:
        errors.append(error.__cause__)
    texts = [f"{type(cause).__name__}: {cause}" for cause in errors]
    return any(re.search(SHORT_OF_MEMORY, text, re.IGNORECASE) for text in texts)


def any_failed(refs: Sequence["ray.ObjectRef[Any]"]) -> bool:
    """Return whether a call has already ended in an error."""
    if not refs:
        return False
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return any(_outcome(ref)[1] for ref in done)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    return f"{name}: {lines[0]}" if lines else name


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error of vLLM or pydantic."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "validation error" in lines[0]:
        lines = [line.removeprefix("Value error, ") for line in lines[1:]]
    if not lines:
        return type(error).__name__
    message, *_ = lines[0].split(" [type=")
    sentence, *_ = message.split(". ")
    return sentence


def _outcome(ref: "ray.ObjectRef[Any]") -> tuple[Any, RayError | None]:
    try:
        return ray.get(ref), None
    except RayError as error:
        return None, error


def _rank_of_cause(error: RayError) -> int:
    if isinstance(error, RayTaskError):
        return 1 if isinstance(error.cause, (UserError, RunStopped)) else 2
    return 0


def _raise(failure: _Failure, *, actor_name: str, call: str) -> NoReturn:
    error = failure.error
    actor = f"{actor_name} {failure.index}"
    if not isinstance(error, RayTaskError):
        what = "died" if isinstance(error, RayActorError) else "was lost"
        raise LearnerLost(f"{actor} {what} during {call}: {first_line(error)}") from error

    cause = error.cause
    is_ours = isinstance(cause, (UserError, RunStopped))
    if failure.has_waiting_actors and not isinstance(cause, UserError):
        reason = str(cause) if is_ours else first_line(cause)
        if re.search(LOST_CONNECTION, reason):
            raise LearnerLost(f"{actor} failed in {call}: {reason}") from cause
        raise RankFailed(f"{actor} failed in {call}, and others wait for it: {reason}") from cause
    if is_ours:
        raise type(cause)(str(cause)) from error
    raise RunStopped(f"{actor} failed in {call}: {first_line(cause)}") from cause
