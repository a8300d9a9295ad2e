"""The start of a job from Python: its config, its records in a file, and the thread in which it runs."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel

from jobs.common.cli import Config, Result, StopFlag, check_and_run, find_resources
from t2g.config import AnyJob, loading, with_overrides
from t2g.config.python_functions import forget_functions, name_function
from t2g.errors import RunStopped, Stopped, UserError
from t2g.files import write_atomic

GivenConfig = AnyJob | Mapping[str, Any] | str | os.PathLike[str]  # of a call; a text is the path of a YAML file
Records = Iterable[Mapping[str, Any]]  # dicts, or a datasets.Dataset

_running = threading.Lock()  # jobs of one process would share Ray, the stop flag and the progress file


def start(
    schema: Any, run: Callable[..., Result], read: str, config: GivenConfig, given: Mapping[str, Any], **options: Any
) -> Result:
    """Run a job as its command does, and return the result of `run`.

    The job has a thread of its own, since the event loop of a notebook runs in the caller's. The first signal to the
    main thread ends the job at its next checkpoint; a second Ctrl-C only ends the wait for it.

    Args:
        schema: Type of the config.
        run: See `cli.main`, with `read` and `options`.
        given: Key of the config -> its value in place of that of `config`, unless None: a function or its import path,
            or for `data.path` and `eval_data.path` the records themselves.

    Raises:
        UserError: The config or an input cannot be used, or a job of this process is running.
        RunStopped: The run stopped to protect its results.
        Stopped: A signal ended the run; the same call resumes it.
    """
    if not _running.acquire(blocking=False):
        raise UserError("a job of this Python process is still running: wait for its end")

    def job() -> Result:
        try:
            return check_and_run(_load(schema, config, given), run, read, **options)
        except (UserError, RunStopped) as error:  # one of an actor has the remote traceback in its text
            raise getattr(error, "cause", error) from None
        except Stopped:
            raise Stopped("a signal ended the run; the same call resumes it") from None
        finally:
            _running.release()

    stop = StopFlag.installed = StopFlag()
    numbers = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    handlers = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        pool = ThreadPoolExecutor(1, "t2g job")
        future = pool.submit(job)
        pool.shutdown(wait=False)
        return future.result()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _load(schema: type[Config], config: GivenConfig, given: Mapping[str, Any]) -> Config:
    forget_functions()
    source = Path(config) if isinstance(config, str | os.PathLike) else _plain(config)
    records = {key: value for key, value in given.items() if key.endswith(".path") and value is not None}
    values = {key: _plain(value) for key, value in given.items() if value is not None and key not in records}
    values |= dict.fromkeys(records, "records")  # the folder of their file is known once the config is loaded
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    loaded = loading.load(schema, source, overrides, have=find_resources)
    folder = loaded.run.root / loaded.run.name  # a smoke run empties the one inside
    return with_overrides(loaded, {key: _write_records(folder, key, rows) for key, rows in records.items()})


def _plain(value: Any) -> Any:
    """Return a value of a config as YAML could hold it: a section as a dict, a function by its name."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return name_function(value) if callable(value) else str(value) if isinstance(value, os.PathLike) else value


def _write_records(folder: Path, key: str, rows: Records) -> str:
    """Return a file with the records, whose name changes with them: other records must not replace those of a run."""
    from t2g.data.load import describe_unserializable

    lines = []
    for number, row in enumerate(rows, start=1):
        if reason := describe_unserializable(row):
            raise UserError(f"{key}: record {number} {reason}")
        lines.append(f"{json.dumps(row, default=str)}\n")
    content = "".join(lines).encode()
    path = folder / f"records-{xxhash.xxh3_64_hexdigest(content)}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return str(path)
