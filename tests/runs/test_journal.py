"""The journal: cut off anywhere, on a full disk, read back."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from t2g.errors import UserError
from t2g.feedback.records import AnnotatedRecord
from t2g.runs.journal import Journal, read_journal


def record(number: int) -> AnnotatedRecord:
    return AnnotatedRecord(prompt_id=str(number), prompt="p\u2028\n", response="é", critique="c", spans=())


def written(path: Path, *numbers: int) -> None:
    with closing(Journal(path)) as journal:
        for number in numbers:
            journal.append(record(number))


def ids(path: Path) -> list[str]:
    return [record.prompt_id for record in read_journal(path, AnnotatedRecord)]


def test_a_journal_goes_on_after_a_line_that_was_cut_off_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert read_journal(path, AnnotatedRecord) == []
    written(path, 1, 2)
    assert read_journal(path, AnnotatedRecord) == [record(1), record(2)]
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in (0, 1, first - 1, first, first + 1, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:end])
        expected = ["1"] * (end >= first) + ["2"] * (end == len(whole))
        assert ids(path) == expected
        written(path, 3)
        assert ids(path) == [*expected, "3"]


def test_nothing_is_written_before_the_first_record(tmp_path: Path) -> None:
    written(tmp_path / "journal.jsonl")
    assert not (tmp_path / "journal.jsonl").exists()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, 1)
    path.write_bytes(path.read_bytes() + b'{"prompt_id": 3}\n')
    with pytest.raises(UserError, match=r"journal\.jsonl:2 is not a line of this journal: "):
        read_journal(path, AnnotatedRecord)


FULL_DISK = """
import sys
from pathlib import Path
from t2g.feedback.records import AnnotatedRecord
from t2g.errors import UserError
from t2g.runs.journal import Journal

journal = Journal(Path(sys.argv[1]))
try:
    for number in range(10_000):
        journal.append(AnnotatedRecord(prompt_id=str(number), prompt="p" * 1000, response="r", critique="c"))
except UserError as error:
    print(number, error)
"""


def test_a_full_disk_is_one_sentence_and_leaves_whole_lines(tmp_path: Path) -> None:
    """On a file system of 64 KiB of its own, which holds some fifty records."""
    disk = tmp_path / "disk"
    disk.mkdir()
    commands = (
        f'mount -t tmpfs -o size=64k none {disk} && {sys.executable} -c "$1" {disk}/journal.jsonl'
        f" && cp {disk}/journal.jsonl {tmp_path}"
    )
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", commands, "sh", FULL_DISK],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system of one's own on this machine: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    count, _, sentence = done.stdout.partition(" ")
    assert sentence.startswith("journal.jsonl cannot be written to") and int(count) > 10
    assert (tmp_path / "journal.jsonl").read_bytes().endswith(b"\n")
    assert ids(tmp_path / "journal.jsonl") == [str(number) for number in range(int(count))]
