"""Standard input and output of a solution: text up to a limit, and what the tests put into `sys.stdin`."""

import builtins
import io
import sys
from collections.abc import Callable
from typing import Any

_BATCH_CHARS = 2**16  # size of the lines that cross at once
_METHODS = ("read", "readline", "buffer", "buffer.read", "buffer.readline")
_own_input = builtins.input


class SolutionOutput(io.TextIOBase):
    """Replacement of `sys.stdout`. Beyond the limit, printing raises OSError if strict, else it has no effect."""

    encoding = "utf-8"

    def __init__(self, limit: int, *, strict: bool = True) -> None:
        self._parts: list[str] = []
        self._remaining = limit
        self._strict = strict
        self.has_overflowed = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._strict and self._remaining < len(text):
            self.has_overflowed = True
            raise OSError("too much output")
        self._parts.append(text[: self._remaining])
        self._remaining -= min(len(text), self._remaining)
        return len(text)

    @property
    def buffer(self) -> "_OutputBytes":
        return _OutputBytes(self)

    def take(self) -> str:
        """Return the text printed since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        return text


class _OutputBytes(io.RawIOBase):
    """The binary layer of a `SolutionOutput`."""

    def __init__(self, output: SolutionOutput) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(bytes(data).decode(errors="replace"))
        return len(data)


class StdinReader:
    """Reads `sys.stdin` of the tests for the solution, several lines at once."""

    def __init__(self) -> None:
        self._read: list[str] = []  # lines of the last batch
        self._stdin: Any = None
        self._position: int | None = None  # start of the batch in `_stdin`; None: only one line was read

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of `sys.stdin`.

        Args:
            method: Also "lines" for several lines, "input" for `input`, which gives several lines unless the tests
                replaced it, and "buffer.METHOD".
        """
        if method == "lines":
            return self._read_lines()
        if method == "input":
            if builtins.input is _own_input:
                return self._read_lines()
            return builtins.input(*args)
        if method not in _METHODS:
            raise ValueError(f"{method!r:.40} does not read")
        target = sys.stdin
        for name in method.split("."):
            target = getattr(target, name)
        if not callable(target):
            return None
        return target(*args)

    def take_back(self, count: int) -> None:
        """Take back the last lines of the last batch, which the solution did not use."""
        if count and self._position is not None:
            self._stdin.seek(self._position)
            for _ in range(len(self._read) - count):
                self._stdin.readline()

    def _read_lines(self) -> list[str]:
        self._stdin = sys.stdin
        self._read = []
        self._position = None
        is_seekable = isinstance(self._stdin, io.IOBase) and self._stdin.seekable()
        if is_seekable:
            self._position = self._stdin.seek(0, io.SEEK_CUR)
        num_chars = 0
        while num_chars < _BATCH_CHARS and (line := self._stdin.readline()):
            self._read.append(line)
            num_chars += len(line)
            if not is_seekable:
                break
        return list(self._read)


class SolutionInput(io.TextIOBase):
    """Replacement of `sys.stdin` and `input` in the solution's process."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.ask: Callable[..., Any] = lambda *args: []  # `StdinReader.ask` of the tests' process
        self.take_back: Callable[[int], None] = lambda count: None
        self._lines: list[str] = []  # read and not used, last line first

    def readable(self) -> bool:
        return True

    def input(self, prompt: object = "") -> str:
        """Return the next line without its end, as the builtin function does."""
        if not self._lines:
            answer = self.ask("input", prompt)
            if isinstance(answer, str):
                return answer
            self._lines = answer[::-1]
        sys.stdout.write(str(prompt))
        if not self._lines:
            raise EOFError("EOF when reading a line")
        return self._lines.pop().removesuffix("\n")

    def readline(self, size: int = -1, /) -> str:
        if size is not None and size >= 0:
            return self._call("readline", size)
        if not self._lines:
            self._lines = self.ask("lines")[::-1]
        if not self._lines:
            return ""
        return self._lines.pop()

    def read(self, size: int | None = -1, /) -> str:
        return self._call("read", -1 if size is None else size)

    @property
    def buffer(self) -> "_InputBytes":
        self._call("buffer")
        return _InputBytes(self._call)

    def _call(self, method: str, *args: Any) -> Any:
        self.take_back(self.take_unused())
        return self.ask(method, *args)

    def take_unused(self) -> int:
        """Forget the lines that were read and not used, and return their number."""
        count = len(self._lines)
        self._lines.clear()
        return count


class _InputBytes(io.RawIOBase):
    """The binary layer of a `SolutionInput`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        return self._call("buffer.read", -1 if size is None else size)

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._call("buffer.readline", -1 if size is None else size)
