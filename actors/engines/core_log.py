"""Why an engine core ended: vLLM says only that its process did, and the reason is in the log that both share."""

import os
import re
from pathlib import Path

TAIL_BYTES = 2**16
MAX_CHARS = 300
STDERR = Path("/proc/self/fd/2")  # in a Ray worker a file; a spawned core writes to the same
LAST_LINE = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?:: .*)?")  # the last of a traceback


def find_core_error(log: Path = STDERR) -> str | None:
    """Return the last line of the first traceback in the end of the log; None if the log is no file or has none.

    Later tracebacks are consequences of the first.
    """
    if not log.is_file():
        return None
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    for line in lines:
        if LAST_LINE.fullmatch(line):
            return line[:MAX_CHARS]
    return None
