"""How the process of these tests ends: with pytest's exit code, without the interpreter's own end.

Ray's threads outlive `ray.shutdown`: a driver that killed an actor while it started, or lost a node, keeps its core
worker and the gRPC threads behind it. Beneath them the interpreter's end may die of SIGSEGV, after the last test has
passed and the summary is printed. Ray ends its own workers by `os._exit` for the same reason.
"""

import os
import sys

import pytest

status = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    import ray

    ray.shutdown()  # what a test that failed left running ends with this process, too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(status, pytest.ExitCode.INTERNAL_ERROR))
