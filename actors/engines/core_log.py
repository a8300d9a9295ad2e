"""Why an engine core ended: vLLM says only that its process did, and writes the traceback to the worker's stderr.

With tensor parallelism the traceback is a worker's of vLLM, which writes it to stdout.
"""

import os
from collections.abc import Sequence
from pathlib import Path

TAIL_BYTES = 2**16
MAX_CHARS = 300
STDERR = Path("/proc/self/fd/2")  # in a Ray worker a file; a spawned core writes to the same
HEADER = "Process EngineCore"  # multiprocessing writes it before the traceback that ended the core
TRACEBACK = "Traceback (most recent call last):"
IGNORED = "Exception ignored in"
CHAINS = ("During handling of the above exception", "The above exception was the direct cause")


def find_core_error(log: Path = STDERR) -> str | None:
    """Return the last line of the traceback that ended the core; None if the log is no file or has none."""
    if not log.is_file():
        return None
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    header = next((number for number, line in enumerate(lines) if line.startswith(HEADER)), 0)
    return find_error(lines[header:])


def find_error(lines: Sequence[str]) -> str | None:
    """Return the last line of the first traceback. Of chained tracebacks it is the last one, which was raised."""
    error: str | None = None
    is_inside = False
    is_chained = False
    for before, line in zip(["", *lines], lines, strict=False):
        if is_inside and line and not line[0].isspace():
            error = line[:MAX_CHARS]
            is_inside = False
            is_chained = False
        elif line.startswith(CHAINS):
            is_chained = True
        elif line == TRACEBACK and (error is None or is_chained):
            is_inside = not before.startswith(IGNORED)
    return error
