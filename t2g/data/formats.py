"""Data files by their names: the format, in any case, and the compression."""

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast
from zlib import error as ZlibError

from t2g.errors import UserError

LINES = (".jsonl", ".ndjson")
SUFFIXES = (".json", *LINES, ".csv", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


class FileFormat(NamedTuple):
    """Suffixes of a file in lower case, "" for none: of the format, and of the compression around it."""

    suffix: str
    compression: str


def get_format(path: Path) -> FileFormat:
    """Return the format of a file by its name.

    >>> get_format(Path("logs.JSONL.gz"))
    FileFormat(suffix='.jsonl', compression='.gz')
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return FileFormat(suffix, "")
    return FileFormat(Path(path.stem).suffix.lower(), suffix)


def is_data_file(path: Path) -> bool:
    """Return whether a file of this name is read."""
    return get_format(path).suffix in SUFFIXES


@contextmanager
def open_data(path: Path) -> Iterator[BinaryIO]:
    """Open a data file for reading, decompressed.

    Raises:
        UserError: The file is not what its compression's suffix says, or was cut; also while it is read.
    """
    compression = get_format(path).compression
    if not compression:
        with path.open("rb") as file:
            yield file
        return
    try:
        with _decompress(path, compression) as file:
            yield file
    except (OSError, EOFError, ZlibError, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be decompressed: {error}") from error


def _decompress(path: Path, compression: str) -> BinaryIO:
    if compression == ".zst":
        import pyarrow

        stream = pyarrow.input_stream(str(path), compression="zstd")
        return cast(BinaryIO, io.BufferedReader(stream))
    opener = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[compression]
    return cast(BinaryIO, opener(path, "rb"))
