"""vLLM's OpenAI-compatible server on a policy, in a process that ends with the block or with this process.

It runs vLLM's module, not its command: `vllm serve` reads the metadata of a package named vllm, and the CPU build has
another name. Its arguments are those of our engines.
"""

import http.client
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

import psutil

from actors.cluster.placement import listening_environment
from actors.engines.engine import OVERRIDES_CACHE, Engine, engine_environment
from t2g.config import ModelConfig, ServeJob
from t2g.errors import RunStopped, UserError
from t2g.files import write_atomic
from t2g.text.ends import find_end_ids
from t2g.text.policy_chat import load_policy_tokenizer

MODULE = "vllm.entrypoints.openai.api_server"
TEMPLATE_FILE = "chat_template.jinja"  # in the folder of the log
GENERATION_FOLDER = "generation"  # in the same folder
END_S = 20.0  # timeout from SIGTERM to the end of the process
POLL_S = 0.2


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Return the engine's arguments as command-line options of the server.

    >>> options({"max_model_len": 64, "seed": None, "enforce_eager": True, "quantization": {"a": 1}, "x": False})
    ['--max-model-len', '64', '--enforce-eager', '--quantization', '{"a": 1}', '--no-x']
    """
    cli_options: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                cli_options.append(f"--{option}")
            case False:
                cli_options.append(f"--no-{option}")
            case str():
                cli_options += [f"--{option}", value]
            case _:
                cli_options += [f"--{option}", json.dumps(value)]
    return cli_options


@contextmanager
def run_server(job: ServeJob, log: Path, stop: Callable[[], bool]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start the server, and end all its processes with the block.

    Args:
        log: File for the output of the server.
        stop: Returns whether the job received a stop signal.

    Yields:
        The process of the server and its base URL, "http://127.0.0.1:8000/v1", once the server answers there.

    Raises:
        UserError: The server ended, or another process listens on the port.
        RunStopped: The server did not answer within engine.start_timeout_s, or `stop` was set.
    """
    host = job.serve.host
    port = find_free_port(host, job.serve.port)
    url = f"http://{host}:{port}"
    command = [sys.executable, "-m", MODULE, *options(_server_arguments(job, port, log.parent))]
    environment = {name: value for name, value in os.environ.items() if name != OVERRIDES_CACHE}
    environment |= engine_environment(job.engine, owner=os.getpid(), receives_weights=False)
    environment |= listening_environment(os.environ)
    with log.open("wb") as output, run_process(command, environment, stdout=output, stderr=output) as process:
        _wait_for_server(process, url, job, log, stop)
        # vLLM binds the port long before it listens there, and until then another process can.
        if not is_listening(process.pid, port):
            raise UserError(f"serve.port={port}: another process answers at {url}; end it, or choose another port")
        yield process, f"{url}/v1"


def _server_arguments(job: ServeJob, port: int, folder: Path) -> dict[str, Any]:
    """Return the arguments of the server by vLLM's names; the files that they name are written into `folder`."""
    engine = Engine(job.model.policy, job.engine, seed=job.run.seed, revision=job.model.revision, guided=True)
    own_arguments = {"host": job.serve.host, "port": port, "served_model_name": job.serve.name}
    own_arguments["generation_config"] = str(write_generation_config(job.model, folder))
    if job.model.system_prompt or job.model.chat_template_kwargs:
        template = load_policy_tokenizer(job.model).chat_template
        template_file = folder / TEMPLATE_FILE
        write_atomic(template_file, template.encode())
        own_arguments["chat_template"] = str(template_file)
    return engine.arguments() | own_arguments


def _wait_for_server(
    process: subprocess.Popen[bytes], url: str, job: ServeJob, log: Path, stop: Callable[[], bool]
) -> None:
    """Return once the server answers; errors as `run_server`."""
    timeout_s = job.engine.start_timeout_s
    deadline = time.monotonic() + timeout_s
    server = f"the server of {job.model.policy}"
    while not is_answering(f"{url}/health"):
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise UserError(f"{server} ended before it answered: {lines[-1]}; see {log}")
        if stop():
            raise RunStopped(f"{server} was stopped; see {log}")
        if time.monotonic() > deadline:
            raise RunStopped(f"{server} has not answered within engine.start_timeout_s={timeout_s:g}; see {log}")
        time.sleep(POLL_S)


def write_generation_config(model: ModelConfig, folder: Path) -> Path:
    """Write a generation_config.json with the ends of a response, and nothing else; return its folder."""
    ends = find_end_ids(load_policy_tokenizer(model), model.policy, model.revision)
    target = folder / GENERATION_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"eos_token_id": ends})
    write_atomic(target / "generation_config.json", text.encode())
    return target


@contextmanager
def run_process(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command; end it with all its child processes when the block ends."""
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # SIGKILL also ends orphaned child processes
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


def find_free_port(host: str, port: int | None) -> int:
    """Return `port`, or any free port if it is None.

    Raises:
        UserError: A process uses the port, or `host` is no address of this machine.
    """
    try:
        with socket.create_server((host, port or 0)) as listener:
            return listener.getsockname()[1]
    except OSError as error:
        need = "an address of this machine, and a port that no other process uses"
        raise UserError(f"serve.host={host}, serve.port={port}: {error.strerror or error}; needs {need}") from error


def is_listening(pid: int, port: int) -> bool:
    """Return whether the process listens on the port. The kernel then lets no other process listen there."""
    with suppress(psutil.Error):  # the process ended
        sockets = psutil.Process(pid).net_connections("tcp")
        listening = [connection for connection in sockets if connection.status == psutil.CONN_LISTEN]
        return any(connection.laddr.port == port for connection in listening)
    return False


def is_answering(url: str) -> bool:
    """Return whether the server of this machine answers; http_proxy is not for it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):  # the latter: another program, which speaks no HTTP
        return False
