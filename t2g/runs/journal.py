"""An append-only journal with one JSON line for each judgement or response.

A killed process loses no line; a power cut loses the lines since the last `sync`.
"""

import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from t2g.config.validation_errors import format_first_error
from t2g.errors import UserError
from t2g.files import raise_if_unwritable, read_regular

Record = TypeVar("Record", bound=BaseModel)


def read_journal(path: Path, schema: type[Record]) -> list[Record]:
    """Return the records of a journal, without an incomplete last line; [] without a file.

    Raises:
        UserError: Another line is not a record, and the message has its number; or the file cannot be read.
    """
    *lines, _incomplete = (read_regular(path) or b"").split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(schema.model_validate_json(line))
        except ValidationError as error:
            raise UserError(f"{path}:{number} is not a line of this journal: {format_first_error(error)}") from error
    return records


class Journal:
    """Writer of a journal. One process writes, see `sole_process`; the first record creates the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None  # descriptor

    def append(self, record: BaseModel) -> None:
        """Append a line, completely or not at all.

        Raises:
            UserError: It cannot be written.
        """
        line = memoryview(f"{record.model_dump_json()}\n".encode())
        with raise_if_unwritable(self._path):
            if self._file is None:
                self._file = self._open()
            file = self._file
            size = os.fstat(file).st_size
            try:
                while line:
                    num_written = os.write(file, line)
                    line = line[num_written:]
            except OSError:
                os.ftruncate(file, size)  # else the next line would continue half a line
                raise

    def sync(self) -> None:
        """Sync the appended lines to the disk. `append` may run in another thread meanwhile.

        Raises:
            UserError: The disk reports an error.
        """
        try:
            if self._file is not None:
                os.fsync(self._file)
        except OSError as error:
            raise UserError(f"{self._path} cannot be synced to the disk: {error}") from error

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        """Open the file for appending and remove an incomplete last line."""
        written = read_regular(self._path) or b""
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o666)
        complete_bytes = written.rfind(b"\n") + 1
        os.ftruncate(file, complete_bytes)
        return file
