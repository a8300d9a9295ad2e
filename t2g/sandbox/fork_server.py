"""The caller's side of the process that forks sandboxes: one per calling process, started by its first run."""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

from t2g.sandbox.box.clock import START_S

OWN_CODE = str(Path(__file__).resolve().parents[2])
PACKAGES = list(dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib")))
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": ".", "TMPDIR": ".", "LANG": "C.UTF-8", "PYTHONPATH": OWN_CODE,
    "PYTHONHASHSEED": "0",  # the same verdict for the same code
    "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    # A fork has the calling thread alone: a pool of BLAS threads would hang in it.
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip


class ServerLost(RuntimeError):
    """The process that forks sandboxes ended or did not answer."""


class _Server:
    """One process that runs `start.py`."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python = getattr(sys, "_base_executable", None) or sys.executable  # a virtual environment's reads its files
        start = str(Path(__file__).with_name("start.py"))
        # Forks keep the command line: by "caller" an operator finds who started them.
        paths = json.dumps({"packages": PACKAGES, "own_code": OWN_CODE, "caller": os.getpid()})
        with theirs:
            self.process = subprocess.Popen(
                [python, "-s", "-S", "-P", start, paths], stdin=theirs, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, cwd="/", env=_ENVIRONMENT, start_new_session=True,
            )  # fmt: skip
        self.control.settimeout(START_S)
        self._receive()

    def fork(self, plan: str, descriptors: list[int]) -> int:
        with contextlib.suppress(OSError):
            socket.send_fds(self.control, [plan.encode()], descriptors)
        return self._receive()[0]

    def _receive(self) -> list[int]:
        """Return the descriptors of the next answer. ServerLost."""
        with contextlib.suppress(OSError):
            message, descriptors, _, _ = socket.recv_fds(self.control, 64, 1)
            if message:
                return descriptors
        self.close()
        assert self.process.stderr
        words = self.process.stderr.read()[-500:].decode(errors="replace")
        raise ServerLost(f"the process that forks sandboxes ended, or gave no answer in {START_S:g} s: {words}")

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


_lock = threading.Lock()
_server: _Server | None = None


def fork_sandbox(plan: str, descriptors: list[int]) -> int:
    """Start a sandbox and return a descriptor of its supervisor's process. A lost server is replaced once."""
    global _server
    with _lock:
        if _server is not None:
            with contextlib.suppress(ServerLost):
                return _server.fork(plan, descriptors)
        _server = _Server()
        return _server.fork(plan, descriptors)


def _forget() -> None:
    """A fork of the caller starts a server of its own: two clients of one socket would take each other's answers."""
    global _server, _lock
    if _server is not None:
        _server.control.close()
    _server, _lock = None, threading.Lock()


atexit.register(lambda: _server and _server.close())
os.register_at_fork(after_in_child=_forget)
