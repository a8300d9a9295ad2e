"""A client of Ray's job server for `jobs.deploy`: submit, follow, stop. Each request has a deadline."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from t2g.deploy.submission import (
    Submission,
    describe_left_out,
    is_attempt,
    refuse_large,
    select_files,
    stop_wait_s,
    write_package,
)
from t2g.errors import RunStopped, UserError

REQUEST_TIMEOUT_S = 60.0  # one request; an upload of 50 MiB needs 7 Mbit/s
END_TIMEOUT_S = 30.0  # from the end of a job's log, or of its time to stop, to the end of the job
RECONNECT_S = 300.0  # for how long requests about a job are repeated while its server is away
POLL_S = 0.5
MAX_NODES = 10_000  # limit of one answer


class JobClient(JobSubmissionClient):
    def _do_request(self, *args: Any, **options: Any) -> Any:
        options.setdefault("timeout", REQUEST_TIMEOUT_S)  # Ray's own has no timeout
        return super()._do_request(*args, **options)


def wait_for_nodes(address: str | None, count: int, *, timeout_s: float) -> None:
    """Wait until the cluster of the job server at `address` has `count` nodes.

    Raises:
        UserError: The cluster refuses the token.
        RunStopped: It has fewer after timeout_s.
    """
    deadline = time.monotonic() + timeout_s
    num_nodes = 0
    with _explain_errors(address):
        while num_nodes < count:
            if time.monotonic() > deadline:
                late = f"the cluster has {num_nodes} of {count} nodes after {timeout_s:.0f} s; see Ray's output"
                raise RunStopped(late)
            time.sleep(POLL_S)
            with contextlib.suppress(RayStateApiException, ConnectionError, requests.exceptions.RequestException):
                nodes = list_nodes(address, filters=[("state", "=", "ALIVE")], limit=MAX_NODES)
                num_nodes = len(nodes)


@contextmanager
def _explain_errors(address: str | None) -> Iterator[None]:
    """Raise UserError if the job server at `address` does not answer, or refuses a request.

    It clears the variables by which Ray would prefer another server.
    """
    if address is not None:
        for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
            os.environ.pop(name, None)
    try:
        yield
    except RunStopped:
        raise
    except AuthenticationError as error:
        raise UserError(
            f"the cluster refuses: {' '.join(str(error).split())}; set RAY_AUTH_MODE=token, and its token as "
            "RAY_AUTH_TOKEN or in the file that RAY_AUTH_TOKEN_PATH names"
        ) from None
    except (ConnectionError, requests.exceptions.RequestException) as error:
        where = address or "RAY_ADDRESS or on this machine"
        raise UserError(f"no Ray job server answers at {where} ({type(error).__name__}); see --address") from None
    except RuntimeError as error:  # Ray's client raises it for an answer other than 200
        raise UserError(f"the job server of the cluster: {' '.join(str(error).split())}") from None


class JobServer:
    """The jobs of one cluster."""

    def __init__(self, client: Any, *, end_timeout_s: float = END_TIMEOUT_S, reconnect_s: float = RECONNECT_S) -> None:
        """`client` is a JobSubmissionClient."""
        self._client = client
        self._end_timeout_s = end_timeout_s
        self._reconnect_s = reconnect_s
        self._printed = 0  # printed characters of the followed log

    @classmethod
    @contextmanager
    def connect(cls, address: str | None) -> Iterator[Self]:
        """Connect to the job server at `address`, or if None at RAY_ADDRESS, or else on this machine.

        Raises:
            UserError: The server does not answer, or refuses the request.
        """
        with _explain_errors(address):
            yield cls(JobClient(address))

    def submit(self, job: Submission, root: Path) -> str:
        """Upload the code under `root`, start the job, return its id. Raises UserError for a too large upload."""
        upload = select_files(root)
        files = upload.files
        left_out = describe_left_out(upload)
        if left_out:
            print(left_out, flush=True)
        refuse_large(root, files)
        taken = {known.submission_id for known in self._client.list_jobs()}
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "package.zip"
            write_package(root, files, package)
            return self._client.submit_job(
                entrypoint=job.entrypoint,
                submission_id=job.job_id(taken),
                runtime_env=job.runtime_env(package),
                metadata=dict(job.metadata),
            )

    def running_attempts(self, run_name: str) -> dict[str, float]:
        """Return the attempts at a run that have not ended: id -> seconds that the job may need to stop."""
        attempts: dict[str, float] = {}
        for job in self._client.list_jobs():
            if not job.submission_id or job.status.is_terminal():
                continue
            if is_attempt(run_name, job.submission_id, job.metadata):
                attempts[job.submission_id] = stop_wait_s(job.metadata)
        return attempts

    def stop(self, job_id: str, wait_s: float) -> str:
        """Send SIGTERM to the job's driver; return its final status.

        Raises:
            RunStopped: The job does not end within wait_s.
        """
        asyncio.run(self._repeat_request(job_id, self._client.stop_job))
        job = asyncio.run(self._wait_for_end(job_id, wait_s + self._end_timeout_s))
        return str(job.status)

    def follow(self, job_id: str, wait_s: float) -> int:
        """Print the job's log until it ends; return its exit code, 130 for a job that was stopped.

        Ctrl-C stops the job and waits for its end, at most `wait_s`. A second Ctrl-C ends the waiting.
        """
        try:
            asyncio.run(self._print_log(job_id))
        except KeyboardInterrupt:
            print(f"stopping job {job_id}: it has {wait_s:.0f} s to leave a checkpoint", flush=True)
            asyncio.run(self._repeat_request(job_id, self._client.stop_job))
            timeout_s = wait_s + self._end_timeout_s
            try:
                asyncio.run(asyncio.wait_for(self._print_log(job_id), timeout_s))
            except TimeoutError:
                late = f"job {job_id} has not ended {timeout_s:.0f} s after the stop request"
                raise RunStopped(late) from None
        job = asyncio.run(self._wait_for_end(job_id, self._end_timeout_s))
        print(f"job {job_id}: {job.status}", flush=True)
        exit_codes = {"SUCCEEDED": 0, "STOPPED": 130}
        return exit_codes.get(str(job.status), job.driver_exit_code or 3)

    async def _print_log(self, job_id: str) -> None:
        """Print the log until the job has ended. A lost connection is restored, and no text is printed twice.

        Raises:
            RunStopped: The server did not answer for `reconnect_s`.
        """
        while True:
            num_read = 0
            with contextlib.suppress(RuntimeError, aiohttp.ClientError):
                async for text in self._client.tail_job_logs(job_id):
                    num_known = max(0, self._printed - num_read)
                    print(text[num_known:], end="", flush=True)
                    num_read += len(text)
                    self._printed = max(self._printed, num_read)
            job = await self._read_job(job_id)
            if job.status.is_terminal():
                return
            await asyncio.sleep(POLL_S)

    async def _wait_for_end(self, job_id: str, timeout_s: float) -> Any:
        """Return the job's details once it has ended."""
        deadline = time.monotonic() + timeout_s
        while not (job := await self._read_job(job_id)).status.is_terminal():
            if time.monotonic() > deadline:
                raise RunStopped(f"job {job_id} has not ended within {timeout_s:.0f} s; its status is {job.status}")
            await asyncio.sleep(POLL_S)
        return job

    async def _read_job(self, job_id: str) -> Any:
        return await self._repeat_request(job_id, self._client.get_job_info)

    async def _repeat_request(self, job_id: str, request: Callable[[str], Any]) -> Any:
        """Return the answer to a request about a job; repeat it while the server cannot be reached.

        Raises:
            RunStopped: The server did not answer for `reconnect_s`.
        """
        deadline = time.monotonic() + self._reconnect_s
        while True:
            try:
                return request(job_id)
            except (ConnectionError, RuntimeError, requests.exceptions.RequestException) as error:
                is_away = not isinstance(error, RuntimeError) or "status code 5" in str(error)  # a proxy's 502, 503
                if not is_away:
                    raise
                if time.monotonic() > deadline:
                    raise RunStopped(
                        f"job {job_id} may still run: its server has not answered for {self._reconnect_s:.0f} s "
                        f"({type(error).__name__}); `python -m jobs.deploy status` reads the run folder"
                    ) from None
            await asyncio.sleep(POLL_S)
