"""Load records from JSON (a list, or an object of id -> record), JSON lines, CSV, Parquet, and hub data sets.

Files may be compressed, see `t2g.data.formats`.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any
from uuid import UUID

from t2g.config import DataConfig
from t2g.data.folders import is_saved_dataset, list_split, read_saved_dataset
from t2g.data.formats import COMPRESSIONS, LINES, SUFFIXES, get_format, is_data_file, open_data
from t2g.errors import MissingLocally, UserError
from t2g.files import is_lfs_pointer
from t2g.tasks.base import describe_record
from t2g.text.messages import CONVERSATION_FIELDS, get_role

NEWLINE = b"\n"
GZIP = b"\x1f\x8b"
GLOB = re.compile(r"[*?]")
MAX_CELL_CHARS = 2**31 - 1  # characters of a cell of CSV; by default Python reads 131,072
MAX_REASON_CHARS = 600  # characters of a library's error
MAX_DEPTH = 100  # levels of nested lists and objects; pydantic cannot read a journal line with some 200 levels
_PLAIN = (str, int, float, Decimal, date, time, timedelta, type(None))


class FileRecord(dict[str, Any]):
    """A record with the place where it was read."""

    def __init__(self, values: dict[str, Any], where: str, file: str) -> None:
        super().__init__(values)
        self.where = where  # base name and position, for messages
        self.file = file  # base name


class _NotLoaded(Exception):
    """`datasets` cannot load a data set whose files may be read nevertheless."""

    def __init__(self, is_unreachable: bool) -> None:
        super().__init__()
        self.is_unreachable = is_unreachable


class _TwoObjects(UserError):
    """A JSON file holds a second value after the first."""


def load_records(config: DataConfig, key: str = "data") -> list[dict[str, Any]]:
    """Return the first `config.limit` records, with `config.columns` renamed to our names; `FileRecord` those of files.

    In a JSON object of records, as the paper's authors publish SLF5K, the key of each record becomes its `id`.

    Args:
        key: The config's section, for error messages.

    Raises:
        UserError: A file is missing, empty or broken; a column is missing; or a journal cannot hold a value, see
            `describe_unserializable`. The message names file and line.
    """
    rows = chain.from_iterable(_read_path(path, config, key) for path in config.paths)
    records = list(islice(rows, config.limit))
    if not records:
        raise UserError(f"{key}.path={config.name} holds no records")
    missing = [column for column in config.columns.values() if not _has_column(records, column)]
    if missing:
        missing_columns = ", ".join(missing)
        columns = ", ".join(records[0])
        raise UserError(
            f"{key}.columns names {missing_columns}, and record 1 of {config.name} has only {columns}; an entry is "
            "{field of the task: column of the file}"
        )
    return [_rename(row, number, config, key) for number, row in enumerate(records, start=1)]


def _has_column(records: Iterable[dict[str, Any]], column: str) -> bool:
    """Return whether any record has the column: an empty cell is missing from its row."""
    return any(column in row for row in records)


def _read_path(name: str, config: DataConfig, key: str) -> Iterator[dict[str, Any]]:
    path = Path(name)
    check_path(key, name, config)
    if is_saved_dataset(path):
        saved_rows = read_saved_dataset(path, config, key)
        for number, row in enumerate(saved_rows, start=1):
            yield FileRecord(row, f"{path.name}, record {number}", path.name)
        return

    files = _list_files(path, config, key)
    if not files:
        try:
            rows = _load_dataset(name, config, key)
        except _NotLoaded as error:
            files = _list_snapshot(name, config, key, only_cached=error.is_unreachable)
        else:
            yield from rows
            return
    for file in files:
        folder = f"{file.parent}/"  # not in messages, which stand in records that may be published
        for place, row in read_file(file):
            yield FileRecord(row, place.removeprefix(folder), file.name)


def _list_files(path: Path, config: DataConfig, key: str) -> list[Path]:
    """Return the files of a path, [] if there are none that this module reads."""
    if path.is_dir():
        return list_split(path, config)
    if not path.exists():
        return []
    if config.split != "train":  # else a training file would be read as the held-out one
        raise UserError(
            f"{key}.split={config.split}: {path} is a file, and a file has no splits; give one file for each"
        )
    return [path]


def describe_unserializable(value: Any, depth: int = MAX_DEPTH) -> str:
    """Return why a journal cannot store this value and read it again, as the end of a sentence; "" if it can.

    >>> describe_unserializable({"image": b"GIF"})
    'holds bytes, which no journal can keep'
    """
    if isinstance(value, _PLAIN):
        return ""
    if not isinstance(value, dict | list | tuple):
        return f"holds {type(value).__name__}, which no journal can keep"
    if depth == 0:
        return f"is nested more than {MAX_DEPTH} deep"
    items = value.values() if isinstance(value, dict) else value
    for item in items:
        reason = describe_unserializable(item, depth - 1)
        if reason:
            return reason
    return ""


def _rename(row: dict[str, Any], number: int, config: DataConfig, key: str) -> dict[str, Any]:
    for name, value in row.items():
        if isinstance(value, UUID):
            row[name] = str(value)
            continue
        reason = describe_unserializable(value)
        if reason:
            raise UserError(f"{describe_record(row, number, key)}: field {name} {reason}")
    renamed: dict[str, Any] = {}
    for name, column in config.columns.items():
        if column in row:
            renamed[name] = row[column]
    for column in config.columns.values():
        row.pop(column, None)
    row.update(renamed)
    return row


def read_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and position in it, record) of a file of any supported format. Raises as `load_records`."""
    if is_lfs_pointer(path):
        raise UserError(f"{path}: is a pointer of Git LFS in place of the data: run `git lfs pull`, or download it")
    suffix = get_format(path).suffix
    if suffix == ".parquet":
        return _add_positions(path, _read_parquet(path))
    if suffix in LINES:
        return read_lines(path)
    if suffix == ".csv":
        return _read_csv(path)
    if suffix != ".json":
        endings = f"{', '.join(SUFFIXES)}, or one of them with {', '.join(COMPRESSIONS)}"
        raise UserError(f"{path}: files of this kind are not read; give one of {endings}")
    text = _decode(_read_bytes(path), path)
    try:
        data = _parse(text, path)
    except _TwoObjects:
        if not _begins_with_an_object(text):
            raise
        return read_lines(path)  # JSON lines in a .json file
    return _add_positions(path, _iterate_json(data, path))


def _begins_with_an_object(text: str) -> bool:
    """Return whether the first line is an object by itself."""
    first_line, _, _ = text.lstrip().partition("\n")
    try:
        return isinstance(json.loads(first_line), dict)
    except (ValueError, RecursionError):
        return False


def _read_bytes(path: Path) -> bytes:
    with open_data(path) as file:
        return file.read()


def _add_positions(path: Path, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(rows, start=1):
        yield f"{path}, record {number}", row


def _iterate_json(data: Any, path: Path) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        values = [*data.values()]
        holds_lists = bool(data) and all(isinstance(value, list) for value in values)
        if holds_lists and not _has_conversation(data):
            raise UserError(f"{path}: holds lists of {', '.join(data)}; it needs to be a list of records")
        objects = [value for value in values if isinstance(value, dict)]
        if len(objects) < len(values) and not _share_a_key(objects):  # one record alone
            yield data
            return
        if objects and all("0" in value for value in objects):
            raise UserError(f"{path}: holds columns; write records, with pandas by to_json(..., orient='records')")
        for key, row in data.items():
            _check_object(row, key, path)
            yield {"id": key, **row}
    elif isinstance(data, list):
        for number, row in enumerate(data, start=1):
            _check_object(row, number, path)
            yield row
    else:
        raise UserError(f"{path}: holds {type(data).__name__}; a list or an object of records is needed")


def _has_conversation(record: dict[str, Any]) -> bool:
    names = ("prompt", *CONVERSATION_FIELDS)
    return any(_is_conversation(record.get(name)) for name in names)


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and get_role(message) is not None for message in value)


def _share_a_key(objects: Sequence[dict[str, Any]]) -> bool:
    """Return whether several objects have a key in common, as records of one data set do."""
    if len(objects) < 2:
        return False
    keys = [set(item) for item in objects]
    return bool(set.intersection(*keys))


def _check_object(row: Any, entry: str | int, path: Path) -> None:
    if not isinstance(row, dict):
        start = json.dumps(row)[:60]
        raise UserError(f"{path}: entry {entry} is {start}; it needs to be an object")


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file:line, record) of a JSON lines file; blank lines are skipped.

    Raises:
        UserError: A line is not a JSON object.
    """
    with open_data(path) as file:
        for number, raw in enumerate(file, start=1):
            line = _decode(raw, path, number).strip()
            if not line:
                continue
            if number == 1 and line.startswith("[") and get_format(path).suffix in LINES:
                raise UserError(f"{path}:1: a list begins, where JSON lines have an object a line; name the file .json")
            row = _parse(line, path, number)
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: holds {line[:60]}; it needs to be an object")
            yield f"{path}:{number}", row


def _read_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and first line, record) of a CSV file with column names in its first line.

    An empty cell is no value. Quoted cells may hold commas and line ends, as spreadsheets write them. A first column
    without a name is an index, as pandas writes it, and is left out.
    """
    csv.field_size_limit(MAX_CELL_CHARS)
    text = _decode(_read_bytes(path), path)
    rows = csv.reader(StringIO(text, newline=""), strict=True)
    end = 0  # last line of the previous row
    names: list[str] | None = None
    try:
        for cells in rows:
            where = f"{path}:{end + 1}"
            end = rows.line_num
            if names is None:
                names = [cell.strip() for cell in cells]
                _check_column_names(names, where)
                continue
            if cells and len(cells) != len(names):
                raise UserError(f"{where}: {len(cells)} cells, but the first line names {len(names)}")
            row = {name: cell for name, cell in zip(names, cells, strict=False) if cell and name}
            if row:
                yield where, row
    except csv.Error as error:
        raise UserError(f"{path}:{end + 1}: not valid CSV: {error}") from error


def _check_column_names(names: list[str], where: str) -> None:
    separators = [mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]]
    if separators:
        raise UserError(f"{where}: the columns are separated by {separators[0]!r}; save the file with commas")
    needed = names[1:] if len(names) > 1 else names  # a first column without a name is an index
    is_unique = len(set(names)) == len(names)
    if not is_unique or not all(needed):
        raise UserError(f"{where}: the columns are {', '.join(names)}; each needs a name of its own")


def _decode(raw: bytes, path: Path, first_line: int = 1) -> str:
    if raw.startswith(GZIP):
        raise UserError(f"{path}: is compressed by gzip; give it a name that ends in .gz")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(NEWLINE, 0, error.start)
        byte = f"byte 0x{raw[error.start]:02x}"
        raise UserError(f"{path}:{line}: {byte} is not UTF-8; save the file as UTF-8") from error


def _parse(text: str, path: Path, first_line: int = 1) -> Any:
    """Parse the JSON in `text`, which begins at `first_line` of the file.

    JSON can contain half of a surrogate pair, which is not a character; tokenizers and files reject it.
    """
    try:
        data = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        if error.msg == "Extra data":
            raise _TwoObjects(f"{path}:{line}: not valid JSON: text follows the first value") from error
        raise UserError(f"{path}:{line}: not valid JSON: {error.msg}") from error
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise UserError(f"{path}:{first_line}: \\u{code:04x} is half of a character") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{first_line}: not valid JSON: {error}") from error
    return data


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException, BufferReader, OSFile
    from pyarrow.parquet import ParquetFile

    is_compressed = get_format(path).compression != ""
    name = ""
    try:
        with BufferReader(_read_bytes(path)) if is_compressed else OSFile(str(path)) as file:
            for batch in ParquetFile(file).iter_batches():
                columns = {}
                for name in batch.schema.names:
                    columns[name] = batch[name].to_pylist()
                for cells in zip(*columns.values(), strict=True):
                    yield dict(zip(columns, cells, strict=True))
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a Parquet file: {reason}") from error
    except (ValueError, OverflowError) as error:  # invalid UTF-8, or a date outside the calendar
        raise UserError(f"{path}: column {name} holds a value that cannot be read: {error}") from error


def check_path(key: str, name: str, config: DataConfig) -> None:
    """Raise UserError for a missing file or folder, and for a hub data set without a revision: it may change."""
    path = Path(name)
    if path.exists():
        return
    is_local = len(config.paths) > 1 or is_data_file(path) or path.is_absolute()
    if GLOB.search(name):
        raise UserError(f"{key}.path={name}: patterns are not expanded; give the folder, or a list of files")
    if is_local:
        raise MissingLocally(f"{key}.path={name}: there is no such file")
    if config.revision is None:
        raise UserError(
            f"{key}.path={name} is not a file here; for a data set on the hub set {key}.revision to a commit, "
            "so that the run can be repeated"
        )


def _load_dataset(name: str, config: DataConfig, key: str) -> Iterable[dict[str, Any]]:
    """Return the rows of a hub data set, or of a folder that only `datasets` can read.

    Raises:
        _NotLoaded: The hub cannot be reached, or the data set has a loading script.
        UserError: It cannot be loaded for another reason.
    """
    import datasets
    import httpx2

    revision = None if Path(name).is_dir() else config.revision
    unreachable = (httpx2.HTTPError, ConnectionError)
    try:
        return datasets.load_dataset(name, config.subset, split=config.split, revision=revision)
    except (datasets.exceptions.DatasetsError, httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        is_unreachable = isinstance(error, unreachable)
        if revision is not None and (is_unreachable or "scripts are no longer supported" in reason):
            raise _NotLoaded(is_unreachable) from error
        raise UserError(
            f"{key}.path={name}, split {config.split}, cannot be loaded: {reason[:MAX_REASON_CHARS]}"
        ) from error


def _list_snapshot(name: str, config: DataConfig, key: str, *, only_cached: bool) -> list[Path]:
    """Return the files of a split in the snapshot of a hub data set, whose data files are downloaded if need be."""
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision=config.revision,
            local_files_only=only_cached,
            allow_patterns=["README.md", *(f"*{suffix}*" for suffix in SUFFIXES)],
        )
    except (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError) as error:
        raise UserError(
            f"{key}.path={name} is not in the hub's cache, and cannot be downloaded: {' '.join(str(error).split())}; "
            f"where there is a network: hf download --repo-type dataset {name} --revision {config.revision}"
        ) from error
    files = list_split(Path(folder), config)
    if not files:
        raise UserError(
            f"{key}.split={config.split}: no data file in {folder} belongs to it; give the file as {key}.path"
        )
    return files
