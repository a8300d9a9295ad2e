"""CSV files to records: the first line names the columns, an empty cell is no value."""

import csv
from collections.abc import Iterator
from pathlib import Path

from t2g.errors import UserError


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line from 1 where it begins, record) of a CSV file in UTF-8. UserError with file and line for a broken one.

    Cells may hold commas and line ends between quotation marks, as spreadsheets write them.
    """
    end = 0  # last line of the record before
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            names = next(rows, [])
            if len(set(names)) < len(names) or not all(names):
                raise UserError(f"{path}:1: the columns are {', '.join(names)}; each needs a name of its own")
            end = rows.line_num
            for cells in rows:
                if cells and len(cells) != len(names):
                    raise UserError(f"{path}:{end + 1}: {len(cells)} cells, but the first line names {len(names)}")
                if any(cells):
                    yield end + 1, {name: cell for name, cell in zip(names, cells, strict=True) if cell}
                end = rows.line_num
    except csv.Error as error:
        raise UserError(f"{path}:{end + 1}: no CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte 0x{error.object[error.start]:02x} is no UTF-8; save it as UTF-8") from error
