"""Folders of data, and compressed files: every file is read, or named."""

import bz2
import gzip
import lzma
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from t2g.config import DataConfig
from t2g.data.damage import find_damage
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
            with pytest.raises(UserError, match=rf"{path.name}: cannot be decompressed ") as error:
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


def write_archive(file: Path, content: bytes) -> None:
    """Write a file `member.jsonl` with this content, in the format of the archive's name."""
    member = file.with_name("member.jsonl")
    member.write_bytes(content)
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.write(member, member.name)
    else:
        with tarfile.open(file, "w:gz" if file.suffix == ".gz" else "w") as archive:
            archive.add(member, member.name)
    member.unlink()


def write_arrow(file: Path) -> None:
    table = pa.table({"prompt": ["a"] * 1000})
    with pa.OSFile(str(file), "wb") as target, pa.ipc.new_stream(target, table.schema) as stream:
        stream.write_table(table, max_chunksize=100)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])  # of the bytes that are left
@pytest.mark.parametrize("name", ["b.tar", "b.tar.gz", "b.zip", "b.arrow"])
def test_a_damaged_archive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, share: float) -> None:
    """`datasets` reads archives, and its readers raise errors without the file's name, some of no module of theirs."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "data" / name
    file.parent.mkdir()
    if name == "b.arrow":
        write_arrow(file)
    else:
        write_archive(file, random.Random(0).randbytes(10_000).hex().encode())
    whole = file.read_bytes()
    assert find_damage(file.parent) == ""
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=rf"{name} is damaged \(.*\); copy or download it again$") as error:
        load(file.parent)
    assert "\n" not in str(error.value)


def test_a_damaged_file_of_a_saved_data_set_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "a"}] * 1000).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-600])
    with pytest.raises(UserError, match=rf"{file.name} is damaged \(.*\); copy or download it again$"):
        load(tmp_path)


def test_a_zip_whose_member_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "data" / "b.zip"
    file.parent.mkdir()
    write_archive(file, LINE * 100)
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"b"', 1))
    with pytest.raises(UserError, match=r"b\.zip is damaged \(wrong checksum of member\.jsonl\)"):
        load(file.parent)


def test_a_file_that_was_cut_in_a_line_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE * 2 + LINE[:9])
    with pytest.raises(UserError, match=r"a\.jsonl:3: not valid JSON: .*; the file ends in this line: if it was cut, "):
        load(path)
    path.write_bytes(LINE[:9] + b"\n" + LINE)
    with pytest.raises(UserError, match=r"a\.jsonl:1: not valid JSON: [^;]*$"):
        load(path)
