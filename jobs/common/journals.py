"""Journals of jobs that judge or measure: a row for each item, written as soon as it is made.

An evaluation of policies has a journal for each kind of row, and an annotation has one of its records. The next start
makes the rows that a journal lacks.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jobs.common.cli import StopFlag
from t2g.concurrency import gather_all
from t2g.config import FeedbackConfig, SourceConfig
from t2g.errors import RunStopped, SamplingFailed, Stopped
from t2g.feedback.sources.chat_client import ChatError
from t2g.runs.journal import Journal, read_journal
from t2g.runs.progress import show_progress
from t2g.text.segments import printable

DRAIN_S = 5.0  # a stopped run waits so long for running judgements without requests to a language model
TICK_S = 0.2  # between checks for signals and journal syncs: a power failure may lose the records of one tick
Row = TypeVar("Row", bound=Any)  # a pydantic model
Items = Mapping[str, Any]  # key of a row -> what the row is made of
MakeRow = Callable[[str, Any], Awaitable[Any]]  # a key and its item -> the row
Prepare = Callable[[Any], Awaitable[Any]]  # an item -> what `MakeRow` gets in its place


class Limits(NamedTuple):
    """The limits of the work on the rows of a journal."""

    concurrency: int  # items in work at one time
    drain_s: float  # seconds for the items in work after a stop request


class ConcurrencyLimit:
    """A limit of concurrent work. After `close` no work starts; the work in flight finishes."""

    def __init__(self, max_in_flight: int) -> None:
        self._slots = asyncio.Semaphore(max_in_flight)
        self._is_open = True
        self.num_in_flight = 0

    def close(self) -> None:
        self._is_open = False

    async def run(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Wait for a slot and await `work(*args)`, unless the limit is closed by then."""
        async with self._slots:
            if not self._is_open:
                return
            self.num_in_flight += 1
            try:
                await work(*args)
            finally:
                self.num_in_flight -= 1


def read_rows(path: Path, schema: type[Row]) -> dict[str, Row]:
    """Return the rows of a journal by their field `key`."""
    return {row.key: row for row in read_journal(path, schema)}


async def _return_item(item: Any) -> Any:
    return item


def make_missing_rows(
    path: Path,
    title: str,
    items: Items,
    make_row: MakeRow,
    *,
    read: Callable[[], Mapping[str, Row]],
    limits: Limits,
    stop: StopFlag,
    prepare: Prepare = _return_item,
    is_recorded: Callable[[Row], bool] = lambda row: True,
    is_final: Callable[[Row], bool] = lambda row: True,
) -> dict[str, Row]:
    """Append the row of each item to a journal, unless the journal has a final row of the item's key.

    Args:
        path: File of the journal.
        title: Name of the phase, for the progress bar and messages.
        items: Key of the row -> what `make_row` gets.
        read: Returns the rows of the journal by key.
        prepare: Makes what `make_row` gets from an item, before the item takes a slot of `limits`.
        is_recorded: Whether a new row is written into the journal; the next start makes the others again.
        is_final: Whether a row of an earlier start needs no other try.

    Returns:
        The rows of all items by key, in the order of the items.

    Raises:
        RunStopped: Some items got no answer; the others are in the journal.
        Stopped: `stop` was set. No item is started then; those in work, which may cost money, have some seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = ConcurrencyLimit(limits.concurrency)
    missing = _drop_final(items, read(), is_final)
    unrecorded: dict[str, Row] = {}
    reasons: list[str] = []  # why items got no new row

    async def add_row(key: str, prepared: Any) -> None:
        row = await make_row(key, prepared)
        if is_recorded(row):
            journal.append(row)
        else:
            unrecorded[key] = row
        bar.advance()

    async def try_item(key: str, item: Any) -> None:
        try:
            prepared = await prepare(item)
            await limit.run(add_row, key, prepared)
        except (ChatError, SamplingFailed) as error:  # the other items go on
            reasons.append(str(error))

    num_final = len(items) - len(missing)
    with closing(Journal(path)) as journal, show_progress(title, len(items), done=num_final) as bar:
        work = gather_all(try_item(*pair) for pair in missing.items())
        asyncio.run(run_until_stopped(work, limit, journal.sync, stop, limits.drain_s))
    rows = {**unrecorded, **read()}
    if num_lost := len(items.keys() - rows.keys()):
        raise RunStopped(_describe_lost(title, num_lost, len(missing), reasons))
    return {key: rows[key] for key in items}


def _describe_lost(title: str, num_lost: int, num_missing: int, reasons: Sequence[str]) -> str:
    first = f" (first: {printable(reasons[0])})" if reasons else ""
    return f"{title}: {num_lost} of {num_missing} got no answer{first}; the same command asks again"


def _drop_final(items: Items, rows: Mapping[str, Row], is_final: Callable[[Row], bool]) -> Items:
    """Return the items without those that have a final row."""
    final = {key for key, row in rows.items() if is_final(row)}
    return {key: item for key, item in items.items() if key not in final}


def judging_limits(options: FeedbackConfig) -> Limits:
    """Return the number of concurrent judgements that keep the sources busy, and the time for those after a stop.

    A stopped run waits for requests to language models, which may cost money.
    """
    sources = options.named_sources.values()
    timeouts = [source.llm.request_timeout_s for source in sources if "llm" in source.models]
    concurrency = max(map(_source_concurrency, sources))
    return Limits(concurrency, drain_s=max(timeouts, default=DRAIN_S))


def _source_concurrency(source: SourceConfig) -> int:
    engine = source.engine
    limits = {
        "llm": source.llm.concurrency,
        "reward_model": 2 * engine.workers.initial * engine.max_num_seqs,
        "program": source.sandbox.max_concurrent,
        "human": 1,
    }
    names = {source.source, source.aligner or source.source}
    return max(limits.get(name, source.concurrency) for name in names)


async def run_until_stopped(
    work: Coroutine[Any, Any, None],
    limit: ConcurrencyLimit,
    at_tick: Callable[[], None],
    stop: StopFlag,
    drain_s: float,
) -> None:
    """Run `work` until it ends or `stop` is set.

    `stop` closes `limit`. `work` is then cancelled once no request is running, after drain_s, or by a second signal.

    Raises:
        Stopped: `stop` was set.
    """
    task = asyncio.ensure_future(work)

    async def until(over: Callable[[], bool]) -> None:
        while not task.done() and not over():
            await asyncio.wait([task], timeout=TICK_S)
            at_tick()

    await until(lambda: bool(stop))
    if task.done():
        return task.result()
    limit.close()
    name = stop.signal_name
    stop.signal_name = None  # a second signal sets it again
    waits = f"waiting up to {drain_s:g} s for {limit.num_in_flight} answers under way"
    print(f"{name}: {waits}; once more to stop at once", file=sys.stderr)
    deadline = time.monotonic() + drain_s

    def is_over() -> bool:
        return bool(stop) or not limit.num_in_flight or time.monotonic() >= deadline

    await until(is_over)
    stop.signal_name = name
    if not task.cancel():
        task.result()  # an error of the work takes precedence over the signal
    raise Stopped
