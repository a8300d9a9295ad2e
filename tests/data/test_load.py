"""Data files: every format, column names, and the errors of broken files."""

import gzip
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from t2g.config import DataConfig
from t2g.data.load import MAX_DEPTH, load_records
from t2g.data.prompts import make_prompts
from t2g.errors import UserError
from t2g.feedback.parse import make_failed_feedback
from t2g.feedback.records import AnnotatedRecord, make_annotated_record
from t2g.loop.annotation import make_samples
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import Prompt

ROWS = [{"prompt": "é", "n": 1}, {"prompt": "b", "n": 2}, {"prompt": "c", "n": 3}]
HERE = Path(__file__).parent


def load(path: Path | str | list[str], **fields: Any) -> list[Any]:
    return load_records(DataConfig(path=path if isinstance(path, list) else str(path), **fields))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_every_format_gives_the_same_records(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    for path in (
        write(tmp_path / "d.jsonl", lines),
        write(tmp_path / "blank.jsonl", "\n" + lines.replace("\n", "\r\n\r\n")),
        write(tmp_path / "bom.ndjson", b"\xef\xbb\xbf" + lines.encode()),
        write(tmp_path / "d.json", json.dumps(ROWS, indent=2)),
        write(tmp_path / "lines.json", lines),  # JSON lines under the other name
        tmp_path / "d.parquet",
    ):
        assert load(path) == ROWS, path.name
        assert load(path, limit=2) == ROWS[:2]


def test_an_object_of_records_gives_each_its_key_as_id() -> None:
    records = load(HERE / "slf5k.json")
    assert len(records) == 12
    assert [record["id"] for record in records[:2]] == ["t3_boat01", "t3_dogs02"]
    assert "café in Zürich" in records[2]["Post"]


def test_the_other_published_files(tmp_path: Path) -> None:
    assert [row["prompt_id"] for row in load(HERE / "ultrafeedback.json")[:3]] == ["uf-01", "uf-01", "uf-03"]
    lines = load(HERE / "kodcode.jsonl")
    assert len(lines) == 12
    assert load(write(tmp_path / "kodcode.json", json.dumps(lines, ensure_ascii=False))) == lines  # a list is one too


def test_a_json_file_with_one_line_has_one_record(tmp_path: Path) -> None:
    assert load(write(tmp_path / "d.json", '{"prompt": "a", "n": 1}\n')) == [{"prompt": "a", "n": 1}]
    with_objects = {"prompt": "a", "facts": {"n": 1}, "tests": {"passed": 2}}
    assert load(write(tmp_path / "d.json", json.dumps(with_objects))) == [with_objects]
    chat = {"messages": [{"role": "user", "content": "Why?"}]}
    assert load(write(tmp_path / "d.json", json.dumps(chat))) == [chat]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.json", '{"prompt": {"0": "a", "1": "b"}, "n": {"0": 1, "1": 2}}', "orient='records'"),
        ("d.json", '{"prompt": ["a", "b"], "n": [1, 2]}', "a list of records"),
        ("d.json", '{"data": [{"prompt": "a"}]}', "a list of records"),
        ("d.jsonl", '[{"prompt": "a"},\n{"prompt": "b"}]', "name the file .json"),
        ("d.csv", "prompt;n\na;1\n", "separated by ';'"),
        ("d.csv", "prompt\tn\na\t1\n", "separated by '\\t'"),
        ("d.jsonl", gzip.compress(b'{"prompt": "a"}\n', mtime=0), "ends in .gz"),
        ("d.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "git lfs pull"),
        ("d.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", "git lfs pull"),
    ],
)
def test_a_file_in_another_form_is_named_with_what_helps(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    with pytest.raises(UserError) as refused:
        load(write(tmp_path / name, content))
    assert words in str(refused.value) and name in str(refused.value)


def test_a_pattern_is_not_expanded() -> None:
    with pytest.raises(UserError, match=r"^data\.path=d/\*\.jsonl: patterns are not expanded"):
        load("d/*.jsonl")


def test_an_id_of_its_own_is_kept(tmp_path: Path) -> None:
    assert load(write(tmp_path / "d.json", '{"a": {"id": "b"}}')) == [{"id": "b"}]


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"question": "q", "answer": "a", "x": 1}')
    expected = [{"x": 1, "prompt": "q", "reference": "a"}]
    assert load(path, columns={"prompt": "question", "reference": "answer"}) == expected
    with pytest.raises(UserError, match=r"names nope, and record 1 of .* has only question, answer, x"):
        load(path, columns={"prompt": "nope"})


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("d.jsonl", "", "holds no records"),
        ("d.jsonl", "\n\n", "holds no records"),
        ("d.json", "[]", "holds no records"),
        ("d.json", "{}", "holds no records"),
        ("d.jsonl", '{"a": 1}\n{"a": ', "d.jsonl:2: not valid JSON"),
        ("d.jsonl", '{"a": 1}\n\n[1]\n', "d.jsonl:3: holds .1.; it needs to be an object"),
        ("d.jsonl", b'{"a": 1}\n{"a": "\xff"}', "d.jsonl:2: byte 0xff is not UTF-8"),
        ("d.jsonl", '{"a": "\\ud83d"}', r"d.jsonl:1: \\ud83d is half of a character"),
        ("d.jsonl", "\n" + "[" * 100_000, "d.jsonl:2: not valid JSON"),
        ("d.json", "[" * 100_000, "not valid JSON"),
        ("d.json", '[{"a": 1},\n {"a": }]', "d.json:2: not valid JSON"),
        ("d.json", '[\n{"a": 1},\n{"a": 2}\n]\n]', "d.json:5: not valid JSON: text follows"),
        ("d.json", '{\n"a": 1\n}\n{\n"a": 2\n}', "d.json:4: not valid JSON: text follows"),
        ("d.json", '{"a": 1}\n{"a": }', "d.json:2: not valid JSON: Expecting value"),
        ("d.json", "", "d.json:1: not valid JSON"),
        ("d.json", b'[\n{"a": "\xff"}]', "d.json:2: byte 0xff"),
        ("d.json", '[{"a": "\\udc00"}]', "half of a character"),
        ("d.json", '"text"', "holds str"),
        ("d.json", "[1]", "entry 1 is 1"),
        ("d.json", '{"a": {"prompt": "x"}, "b": {"prompt": "y"}, "c": null}', "entry c is null"),
        ("d.parquet", "no parquet", "not a Parquet file"),
        ("d.txt", "a,b", "files of this kind are not read"),
    ],
)
def test_broken_files_are_reported_with_their_line(
    tmp_path: Path, name: str, content: str | bytes, reason: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=reason) as error:
        load(path)
    assert "\n" not in str(error.value)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_what_could_not_be_read_again_from_a_journal_is_refused(tmp_path: Path) -> None:
    for depth in (MAX_DEPTH, MAX_DEPTH + 1, 200, 900):
        path = write(tmp_path / "d.jsonl", json.dumps({"prompt": "p", "deep": nested(depth)}))
        if depth == MAX_DEPTH:
            (row,) = load(path)
            prompt = Prompt(prompt_id="1", prompt_text="p", task="prompts", payload=row)
            line = make_annotated_record(
                prompt, "r", make_failed_feedback("unparsable", source="s", version="")
            ).model_dump_json()
            assert AnnotatedRecord.model_validate_json(line).payload == row
        else:
            with pytest.raises(
                UserError, match=r"^data record 1 \(.*d\.jsonl:1\): field deep is nested more than 100 deep"
            ):
                load(path)


def test_an_id_of_the_type_uuid_is_its_text(tmp_path: Path) -> None:
    number = uuid.UUID("12345678-1234-5678-1234-567812345678")
    column = pa.array([number.bytes], pa.uuid())
    pq.write_table(pa.table({"prompt": ["p"], "id": column}), tmp_path / "d.parquet")
    assert load(tmp_path / "d.parquet") == [{"prompt": "p", "id": str(number)}]


NO_UTF8 = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (pa.array([b"\xff\x00"]), r"data record 1 \(.*d\.parquet, record 1\): field x holds bytes"),
        (pa.array([{"path": "a", "bytes": b"a"}]), r"data record 1 \(.*d\.parquet, record 1\): field x holds bytes"),
        (NO_UTF8, "column x holds a value that cannot be read: 'utf-8' codec"),
        (pa.array([2**62], pa.timestamp("us")), "column x holds a value that cannot be read: date value out of range"),
        (pa.array([2**52], pa.timestamp("s")), "column x holds a value that cannot be read"),
        (pa.array([2**30], pa.date32()), "column x holds a value that cannot be read"),
    ],
)
def test_a_column_that_no_record_can_hold_is_named(tmp_path: Path, values: pa.Array, reason: str) -> None:
    pq.write_table(pa.table({"prompt": ["p"], "x": values}), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=reason) as error:
        load(tmp_path / "d.parquet")
    assert "\n" not in str(error.value)


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert load(write(tmp_path / "d.jsonl", '{"a": "\\ud83c\\udfa7"}')) == [{"a": "🎧"}]


def test_what_is_no_file() -> None:
    with pytest.raises(UserError, match="there is no such file"):
        load("nowhere/d.jsonl")
    with pytest.raises(UserError, match="there is no such file"):
        load("/nowhere/folder")
    with pytest.raises(UserError, match=r"set data\.revision to a commit"):
        load("owner/name")


def test_a_data_set_that_cannot_be_reached_says_how_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match="hf download --repo-type dataset owner/name --revision abc"):
        load("owner/name", revision="abc")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("offline"),
        httpx2.ConnectError("no network"),
        RuntimeError("Dataset scripts are no longer supported, but found SLF5K.py"),
    ],
)
def test_what_the_library_cannot_load_is_read_from_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The snapshot is that of `hf download`; a loading script is not run."""
    blob = write(tmp_path / "blob", '{"prompt": "a"}\n')
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to(blob)
    write(snapshot / "SLF5K.py", "raise SystemExit")
    requests: list[tuple[Any, ...]] = []

    def download(
        name: str, *, repo_type: str, revision: str, local_files_only: bool, allow_patterns: Sequence[str]
    ) -> str:
        requests.append((name, repo_type, revision, local_files_only))
        assert "README.md" in allow_patterns and "*.py" not in allow_patterns
        return str(snapshot)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    records = load("owner/name", revision="abc")
    assert records == [{"prompt": "a"}] and records[0].where == "train.jsonl:1"
    has_script = isinstance(error, RuntimeError)
    assert requests == [("owner/name", "dataset", "abc", not has_script)]
    with pytest.raises(UserError, match=r"data\.split=development: no data file"):
        load("owner/name", revision="abc", split="development")


def test_another_error_of_the_library_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("Config name is missing.\nPlease pick one among: ['main', 'socratic']")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"Config name is missing\. Please pick one among: \['main', 'socratic'\]"):
        load("owner/name", revision="abc")


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    """Else one file would be both the training and the held-out data."""
    file = write(tmp_path / "all.jsonl", '{"prompt": "a"}\n')
    for split in ("test", "train[:80%]"):
        with pytest.raises(UserError, match=r"^data\.split=.*a file has no splits"):
            load(file, split=split)
    assert load(file, split="train") == [{"prompt": "a"}]


def test_a_folder_is_its_split_as_the_datasets_library_finds_it(tmp_path: Path) -> None:
    """Read by this program: the library would give every object the fields of all others."""
    write(tmp_path / "train-2.jsonl", '{"prompt": "b", "facts": {"y": 1}}\n')
    write(tmp_path / "train-1.jsonl", '{"prompt": "a", "facts": {"x": 1}}\n')
    write(tmp_path / "test.jsonl", '{"prompt": "t"}\n')
    records = load(tmp_path)
    assert records == [{"prompt": "a", "facts": {"x": 1}}, {"prompt": "b", "facts": {"y": 1}}]
    assert [(record.file, record.where) for record in records] == [
        (f"train-{n}.jsonl", f"train-{n}.jsonl:1") for n in (1, 2)
    ]
    assert load(tmp_path, split="test") == [{"prompt": "t"}]
    with pytest.raises(UserError, match="split dev, cannot be loaded"):
        load(tmp_path, split="dev")


def test_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    first = write(tmp_path / "z.jsonl", '{"prompt": "1", "n": 1}\n\n{"prompt": "2"}\n')
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "b.csv", "prompt\n3\n")
    last = write(tmp_path / "a.json", '[{"question": "4"}]')
    paths = [str(first), str(folder), str(last)]
    records = load(paths, columns={"prompt": "question"})
    assert records == [{"prompt": "1", "n": 1}, {"prompt": "2"}, {"prompt": "3"}, {"prompt": "4"}]
    assert load(paths, columns={}, limit=3) == records[:3]
    assert [record.where for record in records] == [
        "z.jsonl:1", "z.jsonl:3", "b.csv:2", "a.json, record 1",
    ]  # fmt: skip
    samples = make_samples(records, PromptsTask())
    prompts = make_prompts(records, PromptsTask(), None, 0)
    for loaded in ([sample.prompt for sample in samples], prompts):
        assert [prompt.data_file for prompt in loaded] == ["z.jsonl", "z.jsonl", "b.csv", "a.json"]
        assert [prompt.payload for prompt in loaded] == [{"n": 1}, {}, {}, {}]
    assert samples[2].problem.startswith("data record 3 (b.csv:2) has no response")
    with pytest.raises(UserError, match=r"^data record 4 \(a\.json, record 1\): has no field prompt"):
        make_prompts(load(paths), PromptsTask(), None, 0)


def test_a_list_holds_files_and_folders_that_are_here(tmp_path: Path) -> None:
    here = str(write(tmp_path / "d.jsonl", '{"prompt": "a"}\n'))
    for name in (str(tmp_path / "no.jsonl"), "owner/name"):
        with pytest.raises(UserError, match=f"^data.path={name}: there is no such file"):
            load([here, name], revision="c1")
    empty = str(write(tmp_path / "e.jsonl", ""))
    with pytest.raises(UserError, match=r"e\.jsonl and 2 more holds no records"):
        load([empty] * 3)
    for wrong in ([], [1], None, {"a": 1}):
        with pytest.raises(ValidationError, match="needs a file, a folder, a list of these, or a hub dataset") as error:
            DataConfig.model_validate({"path": wrong})
        assert error.value.error_count() == 1


def test_a_subset_of_a_hub_dataset_is_requested_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def loaded(*path: str | None, **how: str | None) -> list[dict[str, str]]:
        calls.append((path, how))
        return [{"question": "1 + 1?"}]

    monkeypatch.setattr("datasets.load_dataset", loaded)
    config = DataConfig(path="gsm8k", subset="main", revision="abc", split="test", columns={"prompt": "question"})
    assert load_records(config) == [{"prompt": "1 + 1?"}]
    assert calls == [(("gsm8k", "main"), {"split": "test", "revision": "abc"})]
