"""Format status.json for a terminal."""

from datetime import datetime

from t2g.runs.control import FleetStatus, Status
from t2g.runs.progress import format_duration

ENDED = ("stopped", "failed", "done")
SILENT_S = 60.0  # the driver writes every few seconds: after this time it has ended or hangs


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
        lines.append(f"{status.phase}{': ' if status.reason else ''}{_plain(status.reason)}")
    if status.phase in ENDED:
        return "\n".join(lines)
    if age_s > SILENT_S:
        lines.append("the driver has not updated the status since: it has ended or hangs")
    if status.idle:
        shares = ", ".join(f"{_plain(role)} {share:.0%}" for role, share in status.idle.items())
        lines.append(f"idle in the last step: {shares}")
    for fleet in status.fleets:
        lines += ["", *_fleet_lines(fleet)]
    return "\n".join(lines)


def _fleet_lines(fleet: FleetStatus) -> list[str]:
    rows = [("worker", "state", "version", "restarts", "left", "load")]
    for w in fleet.workers:
        version, left = ("-" if number is None else str(number) for number in (w.version, w.restarts_left))
        rows.append((_plain(w.name), _plain(w.state), version, str(w.restarts), left, str(w.load)))
    names, states = (max(len(row[i]) for row in rows) for i in (0, 1))
    window = fleet.restart_window_s and f", restarts left within {format_duration(fleet.restart_window_s)}"
    lines = [f"{_plain(fleet.role)}: target size {fleet.target_size}{window or ''}"]
    lines += [
        f"  {n:<{names}}  {s:<{states}}  {v:>7}  {restarts:>8}  {left:>4}  {load:>4}"
        for n, s, v, restarts, left, load in rows
    ]
    lines += [f"  {_plain(w.name)} {_plain(w.reason)}" for w in fleet.workers if w.reason]
    return lines


def _plain(text: str) -> str:
    """Replace control characters: on a shared mount any user may have written the file."""
    return "".join(c if c.isprintable() else "?" for c in text)
