"""CSV files: lines are named as an editor counts them."""

from pathlib import Path

import pytest

from t2g.config import DataConfig
from t2g.data.load import load_records, read_file
from t2g.errors import UserError


def test_records_with_the_line_where_each_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,note\r\n"two\r\nlines",\r\n\r\n"a ""b"", c",1\n')
    expected = [{"prompt": "two\r\nlines"}, {"prompt": 'a "b", c', "note": "1"}]
    assert list(read_file(path)) == [(f"{path}:2", expected[0]), (f"{path}:5", expected[1])]
    assert load_records(DataConfig(path=str(path))) == expected


def test_the_index_that_pandas_writes_is_no_field(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",prompt,note\n0,Why?,first\n1,How?,\n2,,\n")
    assert [row for _, row in read_file(path)] == [{"prompt": "Why?", "note": "first"}, {"prompt": "How?"}]


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    text = "word " * 60_000  # 300,000 characters
    (tmp_path / "a.csv").write_text(f"prompt\n{text}\n")
    assert [row for _, row in read_file(tmp_path / "a.csv")] == [{"prompt": text}]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"a,b\n1,2\n\n1\n", r"a\.csv:4: 1 cells, but the first line names 2"),
        (b"a,b\n1,2,3\n", r"a\.csv:2: 3 cells, but"),
        (b"a,,b\n1,2,3\n", r"a\.csv:1: the columns are a, , b; each needs a name of its own"),
        (b",\n1,2\n", r"a\.csv:1: the columns are , ; each needs a name of its own"),
        (b"a,a\n1,2\n", r"a\.csv:1: the columns are a, a"),
        (b'a,b\n1,2\n1,"2\n3\n', r"a\.csv:3: not valid CSV: unexpected end of data"),
        (b"a,b\n1,\xff\n", r"a\.csv:2: byte 0xff is not UTF-8"),
    ],
)
def test_a_broken_table_is_named(tmp_path: Path, text: bytes, sentence: str) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(UserError, match=sentence):
        list(read_file(tmp_path / "a.csv"))


def test_an_empty_cell_of_a_renamed_column_is_that_records_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,note\n,first\nWhy?,second\n")
    records = load_records(DataConfig(path=str(path), columns={"prompt": "question"}))
    assert records == [{"note": "first"}, {"note": "second", "prompt": "Why?"}]
