"""jobs.serve around a stand-in for vLLM's server: exit codes are passed on, and nothing is left, whatever happens."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from heads import free_port
from models import SENTENCES, SHARED
from pydantic import ValidationError
from safetensors.numpy import save_file
from stub_server import Answers

from actors.engines import server
from jobs.common.cli import main
from jobs.serve import run
from t2g.config import ServeJob
from t2g.config.serving import ServeConfig
from t2g.tasks.tiny.assets import build_tokenizer

TESTS = Path(__file__).parents[1]
ASKS = "import sys, urllib.request as r; r.urlopen(sys.argv[1].removesuffix('/v1')); sys.exit(int(sys.argv[2]))"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(server, "MODULE", "stub_server")
    monkeypatch.setattr(server, "END_S", 2.0)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    numbers = (signal.SIGTERM, signal.SIGINT)  # the job has handlers of its own
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def serve(folder: Path, port: int, then: str, model: str = "m") -> int:
    config = {
        "run": {"root": str(folder), "name": "s"},
        "model": {"policy": str(folder / model)},
        "engine": {"start_timeout_s": 20},
        "serve": {"port": port, "command": then},
    }
    build_tokenizer(folder / model, SENTENCES, vocab_size=320)
    shape = {"model_type": "llama", "vocab_size": 320, **SHARED}
    (folder / model / "config.json").write_text(json.dumps(shape))
    save_file({"none": np.zeros(1)}, folder / model / "model.safetensors")
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    return main(ServeJob, run, argv=["--config", str(folder / "serve.yaml")])


def has_ended(pid: int) -> bool:
    """Soon: a kill takes a moment."""
    deadline = time.monotonic() + 20
    try:
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    except psutil.NoSuchProcess:
        return True
    return True


def assert_nothing_is_left(folder: Path, port: int) -> None:
    child = int((folder / "s" / "server.log").read_text().split()[0])
    assert has_ended(child)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


@pytest.mark.parametrize("code", [0, 7])
def test_the_commands_exit_code_is_the_jobs(code: int, tmp_path: Path) -> None:
    port = free_port()
    assert serve(tmp_path, port, f'{sys.executable} -c "{ASKS}" {{url}} {code}') == code
    assert_nothing_is_left(tmp_path, port)


@contextmanager
def stranger(port: int) -> Iterator[None]:
    """Another server, of this process, which answers every request with 200."""
    with HTTPServer(("127.0.0.1", port), Answers) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        yield
        other.shutdown()


@contextmanager
def stranger_without_http(port: int) -> Iterator[None]:
    """Another server, of this process, which greets as an SSH server does."""

    def greet() -> None:
        with suppress(OSError):  # the socket is closed
            while True:
                connection, _ = other.accept()
                connection.sendall(b"SSH-2.0-other\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", port)) as other:
        threading.Thread(target=greet, daemon=True).start()
        yield
        other.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("command", "problem"), [("echo it's {url}", "No closing quotation"), ("  ", "is blank"), ("", "is blank")]
)
def test_a_command_that_no_shell_reads_is_refused_before_the_start(command: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ServeConfig(command=command)


def test_a_server_without_http_does_not_answer() -> None:
    port = free_port()
    with stranger_without_http(port):
        assert not server.is_answering(f"http://127.0.0.1:{port}/health")
    with stranger(port):
        assert server.is_answering(f"http://127.0.0.1:{port}/health")


@pytest.mark.parametrize("start", ["before the job", "before its server"])
def test_no_harness_runs_against_another_process_on_the_port(
    start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    start_command = server.run_process

    @contextmanager
    def start_late(command: list[str], *arguments: Any, **more: Any) -> Iterator[Any]:
        """Start the other server once the job has looked at the port."""
        other = stranger(port) if "stub_server" in command else nullcontext()
        with other, start_command(command, *arguments, **more) as process:
            yield process

    if start == "before its server":
        monkeypatch.setattr(server, "run_process", start_late)
    with stranger(port) if start == "before the job" else nullcontext():
        code = serve(tmp_path, port, f"touch {tmp_path}/harness_ran")
    error = capsys.readouterr().err
    assert code == 2
    assert f"serve.port={port}: " in error
    assert "other process" in error
    assert not (tmp_path / "harness_ran").exists()


def test_a_command_that_a_signal_ended(tmp_path: Path) -> None:
    port = free_port()
    assert serve(tmp_path, port, "sh -c 'kill -9 $$'") == 137
    assert_nothing_is_left(tmp_path, port)


def test_a_command_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert serve(tmp_path, port, "no-such-harness {url}") == 2
    assert "no-such-harness" in capsys.readouterr().err
    assert_nothing_is_left(tmp_path, port)


def test_a_server_that_ends_at_once_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(tmp_path, free_port(), "true", model="refused") == 2
    assert "ValueError: no such model" in capsys.readouterr().err


def wait_for_sleep(pid: int) -> list[int]:
    """Return the ids of the processes `sleep 300` below a process, once there is one; [] if none starts in 30 s."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children(recursive=True)
        sleeping = []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "300" in child.cmdline() and child.name() == "sleep":
                    sleeping.append(child.pid)
        if sleeping:
            return sleeping
        time.sleep(0.05)
    return []


def test_sigterm_ends_command_and_server(tmp_path: Path) -> None:
    """In a process of its own, since it is told to stop; the command ends a harness of its own, too."""
    port = free_port()
    code = "import sys; from tests.jobs.test_serve import *; server.MODULE = 'stub_server'; server.END_S = 2.0; "
    code += f"sys.exit(serve(Path({str(tmp_path)!r}), {port}, \"sh -c 'sleep 300 & wait'\"))"
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert "answers at" in job.stdout.readline()
        sleeping = wait_for_sleep(job.pid)
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143
    assert sleeping
    assert all(map(has_ended, sleeping))
    assert_nothing_is_left(tmp_path, port)
