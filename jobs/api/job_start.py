"""The start of a job from Python: its config, its records in a file, and the thread in which it runs."""

import asyncio
import ctypes
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import xxhash
from pydantic import BaseModel

from jobs.common.cli import Config, Result, StopFlag, check_job, find_resources, run_checked
from t2g.config import AnyJob, loading, with_overrides
from t2g.config.python_functions import forget_functions, name_function
from t2g.errors import RunStopped, Stopped, UserError
from t2g.files import write_atomic

GivenConfig = AnyJob | Mapping[str, Any] | str | os.PathLike[str]  # config of a call; a text is the path of a YAML file
Records = Iterable[Mapping[str, Any]]  # dicts, or a datasets.Dataset

ARGUMENTS = {"data.path": "prompts", "eval_data.path": "eval_prompts"}  # by key; others: feedback
_running = threading.Lock()  # jobs of one process would share Ray, the stop flag and the progress file


def start(
    schema: Any,
    run: Callable[[Any, Any], Result],
    read: str,
    config: GivenConfig,
    inputs: Mapping[str, Any],
    check: Callable[[Any], None] | None = None,
) -> Result:
    """Run a job as its command does, and return the result of `run`.

    Signals do what they do to the command. Where an event loop runs, as in a notebook, the job has a thread of its own:
    Ctrl-C and SIGTERM end it at its next checkpoint, or by KeyboardInterrupt if it has none (`evaluate` of a reward
    model or a teacher); a second Ctrl-C only ends the wait for it.

    Args:
        schema: Type of the config.
        run: See `cli.main`, with `read` and `check`.
        inputs: Key of the config -> its value in place of that of `config`, unless None: a function or its import path,
            or for `data.path` and `eval_data.path` the records themselves.

    Raises:
        UserError: The config or an input cannot be used, or a job of this process is running.
        RunStopped: The run stopped to protect its results.
        Stopped, KeyboardInterrupt: A signal ended the run; the same call resumes it.
    """
    if not _running.acquire(blocking=False):
        raise UserError("a job of this Python process is still running: wait for its end")

    def job() -> Result:
        new_files: list[Path] = []
        try:
            loaded = _load(schema, config, inputs, new_files)
            return _check_and_run(loaded, run, read, check)
        except (UserError, RunStopped) as error:  # one of an actor has the remote traceback in its text
            _remove_unused(new_files)
            raise getattr(error, "cause", error) from None
        except Stopped:
            raise Stopped("a signal ended the run; the same call resumes it") from None
        finally:
            _running.release()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.on_signal(number, frame)
        if not stop.is_read:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(KeyboardInterrupt))

    stop = StopFlag()
    in_loop = False
    StopFlag.installed = stop
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGINT, signal.SIGTERM] if in_main_thread else []
    handlers = {number: signal.getsignal(number) for number in numbers}
    with suppress(RuntimeError):
        in_loop = bool(asyncio.get_running_loop())
    try:
        if not in_loop:
            return job()
        pool = ThreadPoolExecutor(1, "t2g job")
        thread_id = pool.submit(threading.get_ident).result()
        for number in numbers:
            signal.signal(number, on_signal)
        future = pool.submit(job)
        pool.shutdown(wait=False)
        return future.result()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _check_and_run(
    config: AnyJob, run: Callable[[Any, Any], Result], read: str, check: Callable[[Any], None] | None
) -> Result:
    checked = check_job(config, read, check)
    return run_checked(checked, run)


def _remove_unused(new_files: list[Path]) -> None:
    """Remove the files with records that no run has: the call was refused."""
    for path in new_files:
        configs = path.parent.rglob(loading.FILE_NAME)
        if not any(path.name in file.read_text() for file in configs):
            path.unlink()


def _load(schema: type[Config], config: GivenConfig, inputs: Mapping[str, Any], new_files: list[Path]) -> Config:
    """Return the config of a call; append new files with records to `new_files`."""
    forget_functions()
    source = Path(config) if isinstance(config, str | os.PathLike) else _plain(config)
    records: dict[str, Records] = {}
    values: dict[str, Any] = {}
    for key, value in inputs.items():
        if value is None:
            continue
        if key.endswith(".path"):
            records[key] = value
        else:
            values[key] = _plain(value)
    # The folder of the files is known once the config is loaded.
    placeholders = {key: f"records of {key}" for key in records}
    values |= placeholders
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
    origin = ", ".join(f"{ARGUMENTS.get(key, 'feedback')}=" for key in values)
    loaded = loading.load(schema, source, overrides, find_resources=find_resources, origin=origin)
    loaded_values = loading.flatten(loaded.model_dump(mode="json"))
    folder = loaded.run.root / loaded.run.name  # a smoke run empties the one inside
    files: dict[str, str] = {}
    for key, rows in records.items():
        path = _write_records(folder, key, rows, new_files)
        for field, value in loaded_values.items():  # annotate.human_file follows data.path
            if value == placeholders[key]:
                files[field] = path
    return with_overrides(loaded, files)


def _plain(value: Any) -> Any:
    """Return a value of a config as YAML could hold it: a section as a dict, a function by its name."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if callable(value):
        return name_function(value)
    if isinstance(value, os.PathLike):
        return str(value)
    return value


def _write_records(folder: Path, key: str, rows: Records, new_files: list[Path]) -> str:
    """Return a file with the records, whose name changes with them: other records must not replace those of a run."""
    from t2g.data.load import describe_unserializable

    lines: list[str] = []
    for number, row in enumerate(rows, start=1):
        if reason := describe_unserializable(row):
            raise UserError(f"{ARGUMENTS[key]}: record {number} {reason}")
        lines.append(f"{json.dumps(row, default=str)}\n")
    content = "".join(lines).encode()
    path = folder / f"records-{xxhash.xxh3_64_hexdigest(content)}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
        new_files.append(path)
    return str(path)
