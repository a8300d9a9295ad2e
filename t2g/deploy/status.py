"""Format status.json for a terminal."""

from datetime import datetime
from typing import NamedTuple

from t2g.runs.control import FleetStatus, Status
from t2g.runs.progress import format_duration

ENDED = ("stopped", "failed", "done")
SILENT_S = 60.0  # the driver writes every few seconds: after this time it has ended or hangs


class _Row(NamedTuple):
    """The cells of one worker."""

    name: str
    state: str
    version: str
    restarts: str
    left: str
    load: str


def format_status(name: str, status: Status, *, done: bool, now: datetime) -> str:
    """Format the state of a run for a terminal.

    run own: step 12 of 100, 768 samples, as of 3 s ago
    idle in the last step: learner 25 %, rollout 10 %

    rollout: target size 2, restarts left within 6 h 00 min
      worker            state    version  restarts  left  load
      rollout worker 0  serving       12         1     2     8

    Args:
        done: Whether the run's summary is written.
    """
    age_s = (now - status.updated).total_seconds()
    ago = f"{format_duration(max(0.0, age_s))} ago"
    lines = [f"run {name}: step {status.step} of {status.num_steps}, {status.samples} samples, as of {ago}"]
    if done and status.step >= status.num_steps:
        lines.append("it is done: policy/, summary.json and report.html are written")
        return "\n".join(lines)  # the engines in the status have ended
    if status.phase != "running":
        separator = ": " if status.reason else ""
        lines.append(f"{status.phase}{separator}{_plain(status.reason)}")
    if status.phase in ENDED:
        return "\n".join(lines)
    if age_s > SILENT_S:
        lines.append("the driver has not updated the status since: it has ended or hangs")
    if status.idle:
        shares = [f"{_plain(role)} {share:.0%}" for role, share in status.idle.items()]
        lines.append(f"idle in the last step: {', '.join(shares)}")
    for fleet in status.fleets:
        lines += ["", *_fleet_lines(fleet)]
    return "\n".join(lines)


def _fleet_lines(fleet: FleetStatus) -> list[str]:
    rows = [_Row("worker", "state", "version", "restarts", "left", "load")]
    for worker in fleet.workers:
        row = _Row(
            name=_plain(worker.name),
            state=_plain(worker.state),
            version=_number(worker.version),
            restarts=str(worker.restarts),
            left=_number(worker.restarts_left),
            load=str(worker.load),
        )
        rows.append(row)
    name_width = max(len(row.name) for row in rows)
    state_width = max(len(row.state) for row in rows)

    window = ""
    if fleet.restart_window_s:
        window = f", restarts left within {format_duration(fleet.restart_window_s)}"
    lines = [f"{_plain(fleet.role)}: target size {fleet.target_size}{window}"]
    for row in rows:
        cells = [
            row.name.ljust(name_width),
            row.state.ljust(state_width),
            row.version.rjust(7),
            row.restarts.rjust(8),
            row.left.rjust(4),
            row.load.rjust(4),
        ]
        lines.append("  " + "  ".join(cells))
    with_reason = [worker for worker in fleet.workers if worker.reason]
    lines += [f"  {_plain(worker.name)} {_plain(worker.reason)}" for worker in with_reason]
    return lines


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _plain(text: str) -> str:
    """Replace control characters: on a shared mount any user may have written the file."""
    characters = [character if character.isprintable() else "?" for character in text]
    return "".join(characters)
