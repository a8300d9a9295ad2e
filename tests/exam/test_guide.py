"""The guide to silent failures: every row names a test that exists, and messages that t2g prints."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "t2g" / "guides" / "16-silent-failures.md"
MIN_ROWS = 18
COLUMNS = ("failure", "elsewhere", "injected", "t2g prints", "test")


class Row(NamedTuple):
    """A failure: its cells, and the test file of its section."""

    cells: list[str]
    file: str

    def find_tests(self) -> list[tuple[str, str]]:
        """Return file and name of each test; a file in the cell counts for the names after it."""
        file = self.file
        tests = []
        for cited in re.findall(r"`([^`]+)`", self.cells[-1]):
            if cited.endswith(".py"):
                file = cited
            else:
                tests.append((file, cited))
        return tests


def read_rows() -> list[Row]:
    rows = []
    for section in re.split(r"^## ", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        files = re.findall(r"`(tests/exam/\w+\.py)`", section)
        for line in re.findall(r"^\| (.*) \|$", section, re.MULTILINE):
            cells = line.split(" | ")
            if tuple(cells) != COLUMNS:
                rows.append(Row(cells, files[0]))
    return rows


@cache
def read_messages() -> str:
    """Return the code with the literals of several lines joined."""
    files = [file for package in ("t2g", "actors", "jobs") for file in sorted((ROOT / package).rglob("*.py"))]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r"[\"']\s*\n\s*f?[\"']", "", code)


def test_the_guide_has_every_failure_of_the_exam() -> None:
    rows = read_rows()
    assert len(rows) >= MIN_ROWS
    assert {len(row.cells) for row in rows} == {len(COLUMNS)}
    cited_files: set[str] = set()
    for row in rows:
        cited_files.update(file for file, _ in row.find_tests())
    exam = {str(file.relative_to(ROOT)) for file in Path(__file__).parent.glob("test_*_failures.py")}
    assert len(exam) == 4
    assert exam <= cited_files


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row.cells[0])
def test_a_row_names_tests_that_exist_and_messages_of_the_code(row: Row) -> None:
    tests = row.find_tests()
    assert tests
    for file, name in tests:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}: {name}"
    for message in re.findall(r'"([^"]+)"', row.cells[3]):
        assert message in read_messages(), message
