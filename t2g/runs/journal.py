"""A journal: one line for each judgement, or response, as it is made; appended, never changed.

A process that is killed loses no line; a cut of the power costs those since the last `sync`.
"""

import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from t2g.config.validation_errors import format_first_error
from t2g.errors import UserError
from t2g.files import raise_if_unwritable

Record = TypeVar("Record", bound=BaseModel)


def read_journal(path: Path, schema: type[Record]) -> list[Record]:
    """The records of a journal, without a last line that was cut off; [] for no file.

    UserError with the number of the line for any other line that is no record.
    """
    if not path.exists():
        return []
    *lines, _cut_off = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(schema.model_validate_json(line))
        except ValidationError as error:
            raise UserError(f"{path}:{number} is no line of this journal: {format_first_error(error)}") from error
    return records


class Journal:
    """The end of a journal. One process writes, see `sole_process`; the file begins with the first record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None  # descriptor

    def append(self, record: BaseModel) -> None:
        """One more line, whole or not at all. UserError where it cannot be written."""
        rest = memoryview(f"{record.model_dump_json()}\n".encode())
        with raise_if_unwritable(self._path):
            file = self._file = self._open() if self._file is None else self._file
            size = os.fstat(file).st_size
            try:
                while rest:
                    rest = rest[os.write(file, rest) :]
            except OSError:
                os.ftruncate(file, size)  # else the next line would be added to half a line
                raise

    def sync(self) -> None:
        """Bring what was appended to the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        """Without a last line that was cut off."""
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o666)
        os.ftruncate(file, self._path.read_bytes().rfind(b"\n") + 1)
        return file
