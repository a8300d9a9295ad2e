"""Folders of data, and compressed files: every file is read, or named."""

import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from t2g.config import DataConfig
from t2g.data.load import load_records
from t2g.errors import UserError
from t2g.feedback.records import load_annotated

LINE = b'{"prompt": "a"}\n'


def load(path: Path, **fields: Any) -> list[Any]:
    return load_records(DataConfig(path=str(path), **fields))


def compress(suffix: str, content: bytes) -> bytes:
    if suffix == ".zst":
        return pa.compress(content, codec="zstd", asbytes=True)
    return {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(content)


def test_a_folder_of_several_formats_loses_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINE * 3)
    (tmp_path / "b.csv").write_text("prompt\nb\n")
    (tmp_path / "c.JSONL").write_bytes(b'{"prompt": "c"}')
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(b'[{"prompt": "d"}]'))
    (tmp_path / "e.NDJSON.zst").write_bytes(compress(".zst", b'{"prompt": "e"}'))
    (tmp_path / "deep").mkdir()
    pq.write_table(pa.table({"prompt": ["f"]}), tmp_path / "deep" / "f.parquet")
    assert sorted(row["prompt"] for row in load(tmp_path)) == ["a", "a", "a", "b", "c", "d", "e", "f"]
    assert not caplog.messages
    (tmp_path / "notes.txt").write_text("no data")
    assert len(load(tmp_path)) == 8 and "not read as split train: notes.txt" in caplog.text


def test_files_of_no_split_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train.jsonl", "test.csv", "more.jsonl"):
        (tmp_path / name).write_bytes(LINE if "json" in name else b"prompt\nt\n")
    (tmp_path / ".hidden.jsonl").write_bytes(LINE)
    monkeypatch.chdir(tmp_path.parent)
    for folder in (tmp_path, Path(tmp_path.name)):
        caplog.clear()
        assert load(folder) == [{"prompt": "a"}]
        assert caplog.messages == [f"{folder}: not read as split train: more.jsonl"]
    assert load(tmp_path, split="test") == [{"prompt": "t"}]


def test_the_configs_of_a_readme_decide(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: b.jsonl\n---\n"
    )
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x"}\n')
    (tmp_path / "b.jsonl").write_bytes(LINE)
    assert load(tmp_path) == [{"prompt": "a"}]


@pytest.mark.parametrize("pattern", ["../other/*.jsonl", "ABSOLUTE", "deep/../../other/b.jsonl"])
def test_a_readme_that_names_files_outside_of_its_folder_is_refused(tmp_path: Path, pattern: str) -> None:
    other = tmp_path / "other"
    folder = tmp_path / "own"
    other.mkdir()
    (folder / "deep").mkdir(parents=True)
    (other / "b.jsonl").write_bytes(LINE)
    (folder / "a.jsonl").symlink_to(other / "b.jsonl")  # as in the hub's cache
    assert load(folder) == [{"prompt": "a"}]
    path = pattern.replace("ABSOLUTE", str(other / "b.jsonl"))
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n---\n"
    )
    with pytest.raises(UserError, match=r"own/README\.md: names the file .*b\.jsonl; it needs files in its own folder"):
        load(folder)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ".GZ"])
def test_a_compressed_file_is_read_or_refused_with_its_name(tmp_path: Path, suffix: str) -> None:
    packed = {
        "d.jsonl": LINE * 1000, "d.json": b'[{"prompt": "a"}]', "d.csv": b"prompt\na\n",
    }  # fmt: skip
    for name, content in packed.items():
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(compress(suffix.lower(), content))
        records = load(path)
        assert records == [{"prompt": "a"}] * (1000 if name == "d.jsonl" else 1)
        assert records[0].file == path.name
        for broken in (path.read_bytes()[:-7], b"no archive"):
            path.write_bytes(broken)
            with pytest.raises(UserError, match=rf"{path.name}: cannot be decompressed: ") as error:
                load(path)
            assert "\n" not in str(error.value)


def test_a_compressed_parquet_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "d.parquet")
    (tmp_path / "d.parquet.gz").write_bytes(gzip.compress((tmp_path / "d.parquet").read_bytes()))
    assert load(tmp_path / "d.parquet.gz") == [{"prompt": "a"}]


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    spans = {"start": [0], "end": [1], "label": [-1]}
    row = {"prompt": "p", "response": "ab", "critique": "c", "spans": spans}
    features = datasets.Features(
        {name: datasets.Value("string") for name in ("prompt", "response", "critique")}
        | {"spans": {name: datasets.List(datasets.Value("int64")) for name in spans}}
    )
    saved = datasets.Dataset.from_list([row, row], features=features)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "several")
    records = load(tmp_path / "one")
    assert records == [row, row]
    assert records[1].where == "one, record 2"
    assert load(tmp_path / "several") == [row, row]
    assert load(tmp_path / "several", split="test") == [row]
    with pytest.raises(UserError, match=r"data\.split=dev: .*several holds the splits train, test"):
        load(tmp_path / "several", split="dev")
    (record, _) = load_annotated(DataConfig(path=str(tmp_path / "one")))
    assert [(span.start, span.end, span.label) for span in record.spans] == [(0, 1, -1)]
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(UserError, match=r"data\.path=.*one: the saved data set cannot be loaded: "):
        load(tmp_path / "one")
