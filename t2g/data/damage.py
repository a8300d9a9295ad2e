"""Find the damaged file of a folder that `datasets` could not read: the errors of its readers name no file."""

import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 2**20


def find_damage(folder: Path) -> str:
    """Return the first tar, zip or Arrow file in a folder that cannot be read whole, with the reason; "" if each can.

    >>> find_damage(Path("no such folder"))
    ''
    """
    for file in sorted(folder.rglob("*")):
        reader = _get_reader(file)
        if reader is None or not file.is_file():
            continue
        try:
            reader(file)
        except Exception as error:  # noqa: BLE001 damaged bytes raise errors of tarfile, zlib, lzma and pyarrow
            return f"{file} is damaged ({describe_error(error)})"
    return ""


def describe_error(error: BaseException) -> str:
    """Return the first line of an error's message, of its cause if it has one, or the name of its class."""
    origin = error.__cause__ or error
    message = str(origin).strip() or type(origin).__name__
    first_line = message.splitlines()[0]
    return first_line.rstrip(":")


def _get_reader(file: Path) -> Callable[[Path], None] | None:
    """Return the function that reads a file of this name whole, None for other formats."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if ".tar" in suffixes or ".tgz" in suffixes:
        return _read_tar
    return {".zip": _read_zip, ".arrow": _read_arrow}.get(file.suffix.lower())


def _read_tar(file: Path) -> None:
    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member)
            while content and content.read(CHUNK_BYTES):
                pass


def _read_zip(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def _read_arrow(file: Path) -> None:
    """Read both formats that have this suffix: a stream, and a file with a footer."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as source:
        try:
            batches = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            batches = pa.ipc.open_file(source)
        batches.read_all()
