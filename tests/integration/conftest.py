"""One Ray cluster for all tests that need no cluster of their own, which of two processes has it, and how they end.

Ray's threads outlive `ray.shutdown`: a driver that killed an actor while it started, or lost a node, keeps its core
worker and the gRPC threads behind it. Beneath them the interpreter's end may die of SIGSEGV, after the last test has
passed and the summary is printed. So it ends with pytest's exit code, without the interpreter's own end, as Ray's own
workers do.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from heads import Head, started_head
from learner_runs import random_rollouts, start_hosts
from models import byte_llama, random_model
from xdist.scheduler import LoadScopeScheduling

from actors.cluster.placement import connect
from actors.engines.rollout import RolloutFleet
from t2g.config import ClusterConfig, HealthConfig, RolloutConfig
from t2g.types import Rollout

status = pytest.StashKey[int]()
NUM_CPUS = 4  # in Ray's books: most of what tests share waits most of the time
# Files whose tests share nothing, in the order in which the process takes them that has not the cluster: the longest
# first, and no long one second, since a process takes the next file while it is in the one before.
ALONE = (
    "test_demo_job", "test_several_nodes", "test_vllm_plugin", "test_deploy_live", "test_python_run",
    "test_end_to_end", "test_transports", "test_engine_refusals",
)  # fmt: skip
FIRST = "test_chaos"  # that process begins with it: it connects to clusters of its own


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who starts a cluster of its own in this process comes before the one that stays."""

    def place(item: pytest.Item) -> int:
        if item.path.stem == FIRST:
            return -2
        if item.path.stem in ALONE:
            return 1 + ALONE.index(item.path.stem)
        return 0 if "cluster" in getattr(item, "fixturenames", ()) else -1

    items.sort(key=place)


class Together(LoadScopeScheduling):
    """All that share a cluster go to one process.

    By file, since `--dist=loadgroup` of xdist 3.8 makes no groups under pytest 9.2: the name of a test, to which it
    adds that of its group, is no field any more.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if Path(file).stem in (FIRST, *ALONE) else "shared"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray on this machine as a job starts it; no process of it is left behind."""
    before = psutil.Process().children()
    init = ray.init
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # workers import helpers by name
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        environ.delenv("RAY_ADDRESS", raising=False)
        environ.setattr(ray, "init", lambda **options: init(**options | {"num_cpus": NUM_CPUS}))
        connect(ClusterConfig(object_store_gib=0.2), {})
    servers = [process for process in psutil.Process().children() if process not in before]
    yield
    started = servers + [
        child for server in servers if server.is_running() for child in server.children(recursive=True)
    ]
    ray.shutdown()
    _, left = psutil.wait_procs(started, timeout=10)
    hanging = [process for process in left if has_shut_down(process)]
    for process in hanging:
        process.kill()
    assert not [process for process in left if process not in hanging]


def has_shut_down(process: psutil.Process) -> bool:
    """Return whether Ray has shut down a worker whose process is there still.

    In Ray 2.60 a worker may hang after that for ever, in a destructor (Publisher::~Publisher) that waits for a lock of
    an event loop that was freed before.
    """
    logs = Path("/tmp/ray").glob(f"session_*/logs/python-core-worker-*_{process.pid}.log")
    return any("Core worker is destructed" in log.read_text(errors="replace") for log in logs)


@pytest.fixture(scope="session")
def hosts(cluster: None) -> list[Any]:
    """Two processes for the learner groups of two ranks."""
    return start_hosts()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What learners train: a folder that nobody writes into."""
    return random_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def rollouts() -> list[Rollout]:
    return random_rollouts()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `rollout_fleet`."""
    folder = tmp_path_factory.mktemp("policy")
    byte_llama(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def rollout_fleet(cluster: None, policy: Path) -> Iterator[RolloutFleet]:
    """One engine for all who do not kill it. Whoever uses it sends it weights first."""
    config = RolloutConfig(
        workers=1, cpus=0.1, max_model_len=640, max_new_tokens=32, kv_cache_gib=0.1, start_timeout_s=600,
        health=HealthConfig(max_failures=10),  # tests have it miss one sync after the other
    )  # fmt: skip
    fleet = RolloutFleet(str(policy), config, seed=1, placement_timeout_s=30)
    fleet.wait_ready()
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """One cluster that jobs are submitted to."""
    with started_head(tmp_path_factory.mktemp("head")) as head:
        yield head


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    ray.shutdown()  # what a test that failed left running ends with this process, too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(status, pytest.ExitCode.INTERNAL_ERROR))
