"""Text that is printed in a sandbox, up to a limit."""

import io


class Output(io.TextIOBase):
    """Replacement of `sys.stdout`. Beyond the limit, printing raises OSError if strict, else it has no effect."""

    def __init__(self, limit: int, *, strict: bool = True) -> None:
        self._parts: list[str] = []
        self._remaining, self._strict = limit, strict
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

    def take(self) -> str:
        """Return the text printed since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        return text
