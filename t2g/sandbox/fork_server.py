"""Start and call the process that forks sandboxes (`box.parent`): one per calling process, started by its first run."""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

OWN_CODE = str(Path(__file__).resolve().parents[2])
PACKAGES = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": ".", "TMPDIR": ".", "LANG": "C.UTF-8", "PYTHONPATH": OWN_CODE,
    "PYTHONHASHSEED": "0",  # the same verdict for the same code
    "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    # A fork has the calling thread alone: a pool of BLAS threads would hang in it.
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip


class SandboxFailed(RuntimeError):
    """No sandbox started. The error says nothing about the solution."""


class _Server:
    """One process that runs `start.py`."""

    def __init__(self) -> None:
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The interpreter of a virtual environment would read files of that environment.
        python = getattr(sys, "_base_executable", None) or sys.executable
        start = str(Path(__file__).with_name("start.py"))
        # Forks keep the command line: "caller" shows an operator which process started them.
        paths = json.dumps({"packages": PACKAGES, "own_code": OWN_CODE, "caller": os.getpid()})
        with server_end:
            self.process = subprocess.Popen(
                [python, "-s", "-S", "-P", start, paths], stdin=server_end, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, cwd="/", env=_ENVIRONMENT, start_new_session=True,
            )  # fmt: skip

    def fork(self, plan: str, descriptors: list[int], deadline: float) -> int | None:
        """Return a descriptor of a new sandbox's process; None if the server ended or missed the deadline.

        Each request has its own socket for the answer, so that threads do not wait for each other.
        """
        answer, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answer, contextlib.suppress(OSError):
            with server_end:
                self.control.settimeout(max(deadline - time.monotonic(), 0.05))
                socket.send_fds(self.control, [plan.encode()], [*descriptors, server_end.fileno()])
            answer.settimeout(max(deadline - time.monotonic(), 0.05))
            _, received, _, _ = socket.recv_fds(answer, 64, 1)
            return next(iter(received), None)
        return None

    def end(self) -> str:
        """End the process and return the last characters of its standard error."""
        self.control.close()
        self.process.kill()
        return self.process.communicate()[1][-500:].decode(errors="replace")


_lock = threading.Lock()  # guards `_server`; no thread waits for a sandbox while it holds the lock
_server: _Server | None = None


def fork_sandbox(plan: str, descriptors: list[int], deadline: float) -> int:
    """Start a sandbox and return a descriptor of its supervisor's process.

    Args:
        plan: See `box.supervisor.main`.
        descriptors: Standard input, output and error of the sandbox.
        deadline: Deadline of the start, seconds of time.monotonic.

    Raises:
        SandboxFailed: The server ended or missed the deadline. It is removed, and the next call starts another.
    """
    global _server
    with _lock:
        server = _server = _server or _Server()
    process = server.fork(plan, descriptors, deadline)
    if process is not None:
        return process
    error_text = ""
    with _lock:
        if _server is server:
            _server = None
            error_text = server.end()
    raise SandboxFailed(f"the process that forks sandboxes ended or gave no answer in time: {error_text}")


def _forget() -> None:
    """Forget the server in a fork of the caller, which then starts its own."""
    global _server, _lock
    if _server is not None:
        _server.control.close()
    _server = None
    _lock = threading.Lock()


atexit.register(lambda: _server and _server.end())
os.register_at_fork(after_in_child=_forget)
