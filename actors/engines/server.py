"""vLLM's OpenAI-compatible server on a policy: a process of its own, which ends with the block, or with this process.

It is vLLM's module, not its command: `vllm serve` asks for the metadata of a package named vllm, and the CPU build has
another name. Its arguments are those of our engines.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from actors.cluster.nodes import listening_environment
from actors.engines.engine import Engine, engine_environment
from t2g.config import ServeJob
from t2g.errors import RunStopped, UserError

MODULE = "vllm.entrypoints.openai.api_server"
END_S = 20.0  # that a process has from SIGTERM to its end
POLL_S = 0.2


def options(arguments: Mapping[str, Any]) -> list[str]:
    """An engine's arguments as the server's command line takes them.

    >>> options({"max_model_len": 64, "seed": None, "enforce_eager": True, "quantization": {"a": 1}, "x": False})
    ['--max-model-len', '64', '--enforce-eager', '--quantization', '{"a": 1}', '--no-x']
    """
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        match value:
            case None:
                continue
            case bool():
                words.append(f"--{option}" if value else f"--no-{option}")
            case str() | int() | float():
                words += [f"--{option}", str(value)]
            case _:
                words += [f"--{option}", json.dumps(value)]
    return words


@contextmanager
def serving(job: ServeJob, log: Path, stop: Callable[[], bool]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The server and its base URL, "http://127.0.0.1:8000/v1", once it answers; on return its processes are gone.

    log: the file for what it says. UserError, with its last words, where it ends instead; RunStopped when it is not up
    within engine.start_timeout_s, or `stop` is set meanwhile.
    """
    host, port = job.serve.host, job.serve.port or _free_port(job.serve.host)
    engine = Engine(job.model.policy, job.engine, seed=job.run.seed, revision=job.model.revision, guided=True)
    at = {"host": host, "port": port, "served_model_name": job.serve.name}
    environment = engine_environment(job.engine, owner=os.getpid(), receives_weights=False)
    environment |= listening_environment(os.environ)
    command = [sys.executable, "-m", MODULE, *options(engine.arguments() | at)]
    with log.open("wb") as said, ended(command, os.environ | environment, stdout=said, stderr=said) as process:
        url = f"http://{host}:{port}"
        deadline = time.monotonic() + job.engine.start_timeout_s
        while not _answers(f"{url}/health"):
            if process.poll() is not None:
                words = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
                raise UserError(f"the server of {job.model.policy} ended before it answered: {words[-1]}; see {log}")
            if stop() or time.monotonic() > deadline:
                late = f"has not answered within engine.start_timeout_s={job.engine.start_timeout_s:g}"
                raise RunStopped(f"the server of {job.model.policy} {'was stopped' if stop() else late}; see {log}")
            time.sleep(POLL_S)
        yield process, f"{url}/v1"


@contextmanager
def ended(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **more: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A command with all the processes that it starts, none of which outlives the block."""
    process = subprocess.Popen(command, env=environment, start_new_session=True, **more)
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # the second also for what the first process left behind
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


def _free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0)) as taken:
            return taken.getsockname()[1]
    except OSError as error:
        raise UserError(f"serve.host={host}: {error.strerror or error}; it needs an address of this machine") from error


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
