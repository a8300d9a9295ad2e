"""A cluster of one node for tests: `ray start --head`, token authentication on, dashboard on loopback."""

import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

START_S = 90  # of a head, a command, a stub; several times what an idle machine needs


@dataclass(frozen=True)
class Head:
    """A cluster of one node."""

    address: str
    metrics_port: int
    environ: dict[str, str]  # of who may speak to it
    token: str
    folder: Path  # for logs
    pid: int

    @contextmanager
    def started(self, cwd: Path, *words: object, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
        """`python -m WORDS`, its output in `log`; ended with the block."""
        command = [sys.executable, "-m", *map(str, words)]
        with log.open("ab") as output:
            process = subprocess.Popen(command, cwd=cwd, env=self.environ, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def run(self, cwd: Path, *words: object, code: int = 0, environ: dict[str, str] | None = None) -> str:
        """Output of the same, which ends by itself, with `code`."""
        command = [sys.executable, "-m", *map(str, words)]
        done = subprocess.run(
            command, cwd=cwd, env=environ or self.environ, capture_output=True, text=True, timeout=START_S, check=False
        )
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        return output


def free_port() -> int:
    """On all addresses, and below those that outgoing connections take: else one may take it before its use."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def until(is_true: Callable[[], bool], what: str, *, timeout_s: float, log: Path | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come: {log.read_text()[-4000:] if log else ''}"
        time.sleep(0.2)


def end_tree(process: "subprocess.Popen[bytes]") -> None:
    """The head and everything under it, by their ids: `ray stop` would end the clusters of others as well."""
    tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in tree:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)


@contextmanager
def started_head(folder: Path) -> Iterator[Head]:
    """It ends with the block; its logs and its token lie in `folder`."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    # Without PYTHONPATH: the job must find the code that was uploaded.
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    environ = plain | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_metrics_report_interval_ms": "1000",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    names = (
        "port",
        "dashboard-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "metrics-export-port",
    )
    ports = {name: free_port() for name in names}
    with tempfile.TemporaryDirectory(prefix="t2g-") as session:  # short: Ray keeps sockets in it
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=2",
            "--dashboard-host=127.0.0.1", "--object-store-memory=300000000", f"--temp-dir={session}",
            "--disable-usage-stats", *(f"--{name}={port}" for name, port in ports.items()),
        ]  # fmt: skip
        log = folder / "head.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{ports['dashboard-port']}"
            metrics = f"http://127.0.0.1:{ports['metrics-export-port']}/metrics"  # of the agent, who starts the jobs
            until(lambda: answers(f"{address}/api/version"), "the dashboard", timeout_s=START_S, log=log)
            until(lambda: answers(metrics), "the agent", timeout_s=START_S, log=log)
            yield Head(address, ports["metrics-export-port"], environ, token.read_text(), folder, process.pid)
        finally:
            end_tree(process)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5)
    except urllib.error.HTTPError:
        return True  # it is there, and wants the token
    except OSError:
        return False
    return True
