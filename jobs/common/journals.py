"""Journals of an evaluation: files with a row for each item, which have a key of what the item was made of."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from jobs.common.cli import StopFlag
from t2g.concurrency import gather_all
from t2g.config import FeedbackConfig, SourceConfig
from t2g.errors import RunStopped, SamplingFailed, Stopped
from t2g.feedback.sources.chat_client import ChatError
from t2g.loop.annotation import ConcurrencyLimit
from t2g.runs.journal import Journal, read_journal
from t2g.runs.progress import show_progress

DRAIN_S = 5.0  # a stopped run waits so long for running judgements without requests to a language model
TICK_S = 0.2  # between checks for signals and journal syncs: a power failure may lose the records of one tick
Row = TypeVar("Row", bound=Any)  # a pydantic model with a field `key`
Items = Mapping[str, Any]  # key of a row -> what the row is made of
MakeRow = Callable[[str, Any], Awaitable[Any]]  # a key and its item -> the row


def read_rows(path: Path, schema: type[Row]) -> dict[str, Row]:
    """Return the rows of a journal by their keys."""
    return {row.key: row for row in read_journal(path, schema)}


def collect(
    path: Path,
    schema: type[Row],
    title: str,
    items: Items,
    make_row: MakeRow,
    concurrency: int,
    drain_s: float,
    stop: StopFlag,
    is_final: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
    """Append `make_row` of each item to a journal, unless the journal has a final row of the item's key.

    Args:
        path: File of the journal.
        schema: Type of its rows.
        title: Name of the phase, for the progress bar and messages.
        items: Key of the row -> what `make_row` gets.
        concurrency: Number of items in work at one time.
        drain_s: Seconds for items in work after `stop` is set.
        is_final: Whether a row of an earlier start needs no other try.

    Returns:
        The rows of all items, in their order.

    Raises:
        RunStopped: Some items got no answer; the others are in the journal.
        Stopped: `stop` was set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = ConcurrencyLimit(concurrency)
    known = read_rows(path, schema)
    final = {key for key, row in known.items() if is_final(row)}
    missing = {key: item for key, item in items.items() if key not in final}

    async def append_row(key: str, item: Any) -> None:
        with suppress(ChatError, SamplingFailed):  # the journal then lacks the row
            row = await make_row(key, item)
            journal.append(row)
            bar.advance()

    with closing(Journal(path)) as journal, show_progress(title, len(missing)) as bar:
        work = gather_all(limit.run(append_row, *pair) for pair in missing.items())
        asyncio.run(run_until_stopped(work, limit, journal.sync, stop, drain_s))
    rows = read_rows(path, schema)
    if num_lost := len(items.keys() - rows.keys()):
        raise RunStopped(f"{title}: {num_lost} of {len(missing)} got no answer; the same command asks again")
    return [rows[key] for key in items]


def drain_seconds(options: FeedbackConfig) -> float:
    """Return how long a stopped run waits for running judgements: requests to language models may cost money."""
    timeouts = [source.llm.request_timeout_s for source in options.named_sources.values() if "llm" in source.models]
    return max(timeouts, default=DRAIN_S)


def judging_concurrency(options: FeedbackConfig) -> int:
    """Return the number of concurrent judgements that keep the sources busy."""
    return max(map(_source_concurrency, options.named_sources.values()))


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
