"""Log lines without control characters: names and texts of data could rewrite what a terminal shows.

Imports nothing heavy.
"""

import logging
from copy import copy
from importlib import import_module
from pathlib import PurePath
from typing import Any


class PrintableFormatter(logging.Formatter):
    """Shows control characters as symbols, and line ends only of the message itself and of tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, with a traceback if there is one."""
        record_copy = copy(record)  # other handlers get the record as it is
        if isinstance(record.args, tuple):
            record_copy.args = tuple(map(_show_line_ends, record.args))
        return to_printable(super().format(record_copy))


def _show_line_ends(value: Any) -> Any:
    """Return a text, an error or a path with symbols for its line ends; other values unchanged."""
    if not isinstance(value, str | BaseException | PurePath):
        return value
    return str(value).replace("\r", "␍").replace("\n", "␊")


def make_log_printable() -> None:
    """Format log lines by PrintableFormatter, unless a library has installed handlers of its own."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())


def to_printable(text: str) -> str:
    """Return the text for a terminal, see `t2g.text.segments.printable`."""
    printable: str = import_module("t2g.text.segments").printable(text)  # heavy: --help answers without it
    return printable
