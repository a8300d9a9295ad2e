"""Log lines of data that would rewrite a terminal."""

import logging
import sys

from jobs.common.printable_log import PrintableFormatter


def format_line(message: str, *args: object, has_traceback: bool = False) -> str:
    error = sys.exc_info() if has_traceback else None
    record = logging.LogRecord("t2g", logging.WARNING, __file__, 1, message, args, error)
    text = PrintableFormatter().format(record)
    assert record.args == args, "another handler gets the record as it is"
    return text


def test_data_cannot_add_lines_or_control_the_terminal() -> None:
    assert format_line("%s: %d rows", "a\x1b[31m\nstep 9: done", 2) == "a␛[31m␊step 9: done: 2 rows"
    assert format_line("two\nlines") == "two\nlines"


def test_a_traceback_stays_on_several_lines() -> None:
    try:
        raise ValueError("bad \x1b[2J")
    except ValueError:
        text = format_line("failed: %s", "x", has_traceback=True)
    assert text.startswith("failed: x\nTraceback") and text.endswith("\nValueError: bad ␛[2J")
