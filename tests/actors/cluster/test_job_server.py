import asyncio
import os
import signal
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus

from actors.cluster import job_server
from actors.cluster.job_server import JobServer
from t2g.deploy.submission import RUN_KEY, STOP_WAIT_KEY, Submission
from t2g.errors import RunStopped, UserError


class FakeClient:
    """Ray's client of one cluster: jobs that print `log` and end when they are told to, or when the log is read."""

    def __init__(
        self,
        *,
        log: str = "",
        breaks_at: int | None = None,
        ends: bool = True,
        exit_code: int = 0,
        ctrl_c: bool = False,
    ) -> None:
        self.jobs: dict[str, Any] = {}
        self.submitted: dict[str, Any] = {}
        self.log = log
        self.breaks_at = breaks_at
        self.ends = ends
        self.exit_code = exit_code
        self.stops = 0
        self.stoppable = True
        self.num_lost_answers = 0
        self.lost_answer: Exception = requests.exceptions.ConnectionError("connection refused")
        self.ctrl_c = ctrl_c  # once the log is read

    def add(self, job_id: str, status: str = "RUNNING", **metadata: str) -> None:
        self.jobs[job_id] = SimpleNamespace(
            submission_id=job_id, status=JobStatus(status), metadata=metadata, driver_exit_code=None
        )

    def list_jobs(self) -> list[Any]:
        return [*self.jobs.values(), SimpleNamespace(submission_id=None, status=JobStatus("RUNNING"), metadata=None)]

    def submit_job(self, **options: Any) -> str:
        with zipfile.ZipFile(options["runtime_env"]["working_dir"]) as package:
            self.submitted = options | {"files": package.namelist()}
        self.add(options["submission_id"], "PENDING", **options["metadata"])
        return options["submission_id"]

    def lose_answer(self) -> None:
        if self.num_lost_answers > 0:
            self.num_lost_answers -= 1
            raise self.lost_answer

    def stop_job(self, job_id: str) -> bool:
        self.lose_answer()
        self.stops += 1
        if self.stoppable:
            self.jobs[job_id].status = JobStatus("STOPPED")
        return True

    def get_job_info(self, job_id: str) -> Any:
        self.lose_answer()
        return self.jobs[job_id]

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """The whole log in pieces of 3; the first connection breaks in the middle."""
        stop = self.breaks_at
        self.breaks_at = None
        for i in range(0, len(self.log), 3):
            if stop is not None and i >= stop:
                raise RuntimeError("the connection was closed")
            yield self.log[i : i + 3]
        if self.ctrl_c:
            self.ctrl_c = False
            os.kill(os.getpid(), signal.SIGINT)
        if self.ends and not self.jobs[job_id].status.is_terminal():
            self.jobs[job_id].status = JobStatus("FAILED" if self.exit_code else "SUCCEEDED")
            self.jobs[job_id].driver_exit_code = self.exit_code
        while not self.jobs[job_id].status.is_terminal():
            await asyncio.sleep(0.01)


def test_a_run_is_submitted_under_an_id_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a.py").touch()
    client = FakeClient()
    client.add("own", "FAILED", **{RUN_KEY: "own"})
    job = Submission(name="own", arguments=("jobs.a", "x=1"), stop_wait_s=90, metadata={RUN_KEY: "own"})
    assert JobServer(client).submit(job, tmp_path) == "own-2"
    assert client.submitted["entrypoint"] == "exec python -m jobs.a x=1"
    assert client.submitted["files"] == ["jobs/a.py"]
    assert client.submitted["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "90"}
    assert client.submitted["metadata"] == {RUN_KEY: "own"}


def test_a_large_upload_never_reaches_the_server(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        os.truncate(file.fileno(), 51 * 2**20)
    client = FakeClient()
    with pytest.raises(UserError, match=r"big \(51\.0 MiB\)"):
        JobServer(client).submit(Submission(name="own", arguments=("jobs.a",)), tmp_path)
    assert client.submitted == {}


def test_only_attempts_at_the_run_that_have_not_ended_are_alive() -> None:
    client = FakeClient()
    client.add("own", "STOPPED", **{RUN_KEY: "own"})
    client.add("own-2", "RUNNING", **{RUN_KEY: "own", STOP_WAIT_KEY: "90"})
    client.add("own-3", "PENDING", **{RUN_KEY: "own-3"})
    assert JobServer(client).running_attempts("own") == {"own-2": 90.0}
    assert JobServer(client).running_attempts("nobody") == {}


def test_the_log_is_printed_once_though_its_connection_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    log = "".join(f"step {i}\n" for i in range(9))
    client = FakeClient(log=log, breaks_at=31)
    client.add("own")
    assert JobServer(client).follow("own", wait_s=5) == 0
    assert capsys.readouterr().out == f"{log}job own: SUCCEEDED\n"


@pytest.mark.parametrize(
    "error",
    [requests.exceptions.ConnectionError("refused"), RuntimeError("Request failed with status code 502: Bad Gateway.")],
)
def test_a_server_that_is_away_for_a_moment_is_asked_again(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient(log="step 1\n", breaks_at=3)
    client.lost_answer = error
    client.add("own")
    client.num_lost_answers = 1
    assert JobServer(client).follow("own", wait_s=5) == 0
    assert capsys.readouterr().out == "step 1\njob own: SUCCEEDED\n"
    client.num_lost_answers = 1
    assert JobServer(client).stop("own", wait_s=5) == "STOPPED" and client.stops == 1
    client.num_lost_answers = 10**6
    with pytest.raises(RunStopped, match=r"job own may still run: its server has not answered for 0 s"):
        JobServer(client, reconnect_s=0.2).follow("own", wait_s=5)


@pytest.mark.parametrize("code", [2, 3, 143])
def test_the_exit_code_is_the_runs(code: int) -> None:
    client = FakeClient(log="no\n", exit_code=code)
    client.add("own")
    assert JobServer(client).follow("own", wait_s=5) == code


def test_ctrl_c_stops_the_job_and_waits_for_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(log="step 1\n", ends=False, ctrl_c=True)
    client.add("own")
    assert JobServer(client).follow("own", wait_s=5) == 130
    assert client.stops == 1
    assert capsys.readouterr().out == "step 1\nstopping job own: it has 5 s to leave a checkpoint\njob own: STOPPED\n"


def test_a_job_that_does_not_stop_is_reported() -> None:
    client = FakeClient(log="step 1\n", ends=False, ctrl_c=True)
    client.add("own")
    client.stoppable = False
    with pytest.raises(RunStopped, match="job own has not ended 0 s after the stop request"):
        JobServer(client, end_timeout_s=0.1).follow("own", wait_s=0.1)
    with pytest.raises(RunStopped, match="job own has not ended within 0 s; its status is RUNNING"):
        JobServer(client, end_timeout_s=0.1).stop("own", wait_s=0.1)


def test_an_unreachable_address_is_one_sentence() -> None:
    with (
        pytest.raises(UserError, match="no Ray job server answers at http://127"),
        JobServer.connect("http://127.0.0.1:9"),
    ):
        pass


def test_waiting_for_nodes_asks_the_given_cluster_and_says_when_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would prefer the cluster of RAY_ADDRESS."""

    def refuse(*_: object, **__: object) -> None:
        raise AuthenticationError("no token")

    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    monkeypatch.setattr(job_server, "list_nodes", lambda *_, **__: [os.environ.get("RAY_ADDRESS")] * 3)
    job_server.wait_for_nodes("http://127.0.0.1:9", 3, timeout_s=10)
    assert "RAY_ADDRESS" not in os.environ
    monkeypatch.setattr(job_server, "list_nodes", refuse)
    with pytest.raises(UserError, match=r"^the cluster refuses: .*set RAY_AUTH_MODE=token"):
        job_server.wait_for_nodes("http://127.0.0.1:9", 3, timeout_s=10)
