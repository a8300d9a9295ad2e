"""One Ray cluster for all tests that need no cluster of their own, and how the process of these tests ends.

Ray's threads outlive `ray.shutdown`: a driver that killed an actor while it started, or lost a node, keeps its core
worker and the gRPC threads behind it. Beneath them the interpreter's end may die of SIGSEGV, after the last test has
passed and the summary is printed. So it ends with pytest's exit code, without the interpreter's own end, as Ray's own
workers do.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from actors.cluster.placement import connect
from t2g.config import ClusterConfig

status = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who starts a cluster of its own in this process comes before the one that stays."""
    items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray on this machine as a job starts it; no process of it is left behind."""
    before = psutil.Process().children(recursive=True)  # as the resource tracker of an engine in this process
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # workers import helpers by name
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        environ.delenv("RAY_ADDRESS", raising=False)
        connect(ClusterConfig(object_store_gib=0.2), {})
    yield
    started = [process for process in psutil.Process().children(recursive=True) if process not in before]
    ray.shutdown()
    _, left = psutil.wait_procs(started, timeout=10)
    assert not left


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    ray.shutdown()  # what a test that failed left running ends with this process, too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(status, pytest.ExitCode.INTERNAL_ERROR))
