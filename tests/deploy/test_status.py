import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from t2g.deploy.status import format_status
from t2g.errors import Stopped, UserError
from t2g.runs.control import FleetStatus, Status, WorkerStatus, now, publish_phases, read_status, write_status

THEN = datetime(2026, 11, 21, 12, tzinfo=UTC)
WORKERS = (
    WorkerStatus(name="rollout worker 0", state="serving", version=12, restarts=4, restarts_left=2, load=8),
    WorkerStatus(name="rollout worker 10", state="starting", reason="waits for a place"),
)
STATUS = Status(
    step=12, num_steps=100, samples=768, updated=THEN, idle={"learner": 0.25, "rollout": 0.1},
    fleets=(
        FleetStatus(role="rollout", target_size=2, restart_window_s=21_600, workers=WORKERS),
        FleetStatus(role="reward", target_size=1, workers=()),
    ),
)  # fmt: skip


def test_the_table() -> None:
    assert format_status("own", STATUS, done=False, now=THEN + timedelta(seconds=3)).splitlines() == [
        "run own: step 12 of 100, 768 samples, as of 3 s ago",
        "idle in the last step: learner 25%, rollout 10%",
        "",
        "rollout: target size 2, restarts left within 6 h 00 min",
        "  worker             state     version  restarts  left  load",
        "  rollout worker 0   serving        12         4     2     8",
        "  rollout worker 10  starting        -         0     -     0",
        "  rollout worker 10 waits for a place",
        "",
        "reward: target size 1",
        "  worker  state  version  restarts  left  load",
    ]


def test_an_old_picture_says_so_and_a_clock_that_is_behind_does_not() -> None:
    assert "as of 1 h 01 min ago\nthe driver has not updated the status since" in format_status(
        "own", STATUS, done=False, now=THEN + timedelta(seconds=3700)
    )
    assert "as of 0 s ago\nidle" in format_status("own", STATUS, done=False, now=THEN - timedelta(seconds=5))


def test_a_finished_run_reports_no_engines_and_needs_no_driver() -> None:
    last = STATUS.model_copy(update={"step": 100, "samples": 6400})
    later = THEN + timedelta(hours=2)
    assert format_status("own", last, done=True, now=later).splitlines() == [
        "run own: step 100 of 100, 6400 samples, as of 2 h 00 min ago",
        "it is done: policy/, summary.json and report.html are written",
    ]
    assert "the driver has not updated the status since" in format_status("own", last, done=False, now=later), (
        "it exports"
    )
    assert "idle" in format_status("own", STATUS, done=True, now=THEN), "a longer run goes on in its folder"


def test_nothing_in_the_file_steers_the_terminal() -> None:
    evil = WorkerStatus(name="\x1b[2J\x07", state="\u202eup", reason="a\nb")
    status = STATUS.model_copy(
        update={"fleets": (FleetStatus(role="r\r", target_size=1, workers=(evil,)),), "idle": {"\x1b": 1.0}}
    )
    words = format_status("own", status, done=False, now=THEN)
    assert all(c.isprintable() or c == "\n" for c in words)
    assert "a?b" in words and "?[2J?" in words


def test_phases_are_reported_with_the_reason_of_the_last(tmp_path: Path) -> None:
    def words() -> str:
        return format_status("own", read_status(tmp_path), done=False, now=now())

    with pytest.raises(UserError), publish_phases(tmp_path, 9) as publish_phase:  # noqa: PT012 the phases in between are tested
        assert words().splitlines()[1] == "starting"
        publish_phase("loading")
        assert words().splitlines()[1] == "loading"
        write_status(tmp_path, STATUS)  # the steering's pictures, while it goes on
        assert "running" not in words()
        raise UserError("no room\x1b[2J")
    first, last = words().splitlines()  # the age is that of a real clock: a slow machine shows a second more
    assert first.startswith("run own: step 12 of 100, 768 samples, as of ") and last == "failed: no room?[2J"
    with pytest.raises(Stopped), publish_phases(tmp_path, 9):
        raise Stopped
    assert read_status(tmp_path).phase == "stopped"
    assert read_status(tmp_path).step == 12
    with publish_phases(tmp_path, 200):  # the run was extended; engines of the earlier process have ended
        started = read_status(tmp_path)
        assert (started.phase, started.num_steps, started.fleets) == ("starting", 200, ())
    with publish_phases(tmp_path, 9):
        pass
    assert read_status(tmp_path).phase == "done"


OLD = datetime(2020, 1, 1, tzinfo=UTC)


def is_renewed(folder: Path, *, within_s: float) -> bool:
    """Return whether a status that is written as old gets the time of now."""
    status = read_status(folder)
    write_status(folder, status.model_copy(update={"updated": OLD}))
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if read_status(folder).updated > OLD:
            return True
        time.sleep(0.005)
    return False


def test_a_driver_is_no_silent_one_while_its_processes_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs its steering writes: a renewal then would hide that the driver hangs."""
    monkeypatch.setattr("t2g.runs.control.RENEW_S", 0.01)
    with publish_phases(tmp_path, 9) as publish_phase:
        assert is_renewed(tmp_path, within_s=20)
        publish_phase("loading")
        assert is_renewed(tmp_path, within_s=20)
        assert read_status(tmp_path).phase == "loading"
        write_status(tmp_path, STATUS)
        assert not is_renewed(tmp_path, within_s=0.1)
        publish_phase("exporting")
        assert is_renewed(tmp_path, within_s=20)
    assert not is_renewed(tmp_path, within_s=0.1)
    assert "t2g-status" not in [thread.name for thread in threading.enumerate()]


def test_a_renewal_never_replaces_a_status_written_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = threading.Thread(target=write_status, args=(tmp_path, STATUS))
    renewed_again = threading.Event()

    def read_while_another_writes(folder: Path) -> Status:
        if writer.ident is not None:
            renewed_again.set()
            return read_status(folder)
        status = read_status(folder)
        writer.start()
        writer.join(0.2)  # ends earlier if nothing makes the writer wait
        return status

    monkeypatch.setattr("t2g.runs.control.RENEW_S", 0.01)
    with publish_phases(tmp_path, 9) as publish_phase:
        publish_phase("loading")
        monkeypatch.setattr("t2g.runs.control.read_status", read_while_another_writes)
        assert renewed_again.wait(20)
        writer.join(20)
        assert read_status(tmp_path) == STATUS
