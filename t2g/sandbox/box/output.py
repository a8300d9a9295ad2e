"""What is printed in a sandbox, up to a bound."""

import io


class Output(io.TextIOBase):
    """Take the place of `sys.stdout`. Past the limit printing is an error, or where not strict, of no effect."""

    def __init__(self, limit: int, *, strict: bool = True) -> None:
        self._parts: list[str] = []
        self._room, self._strict = limit, strict
        self.flood = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._strict and self._room < len(text):
            self.flood = True
            raise OSError("too much output")
        self._parts.append(text[: self._room])
        self._room -= min(len(text), self._room)
        return len(text)

    def take(self) -> str:
        """Return what was printed since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        return text
