"""The way from two people's marks to the files of a reward model: t2g mark, t2g annotate, t2g reward."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from jobs.api.calls import annotate
from t2g.config import DataConfig
from t2g.data.load import load_records
from t2g.feedback.records import load_annotated
from t2g.loop.annotation import make_samples
from t2g.marking.marks import RECORDS_FILE, Mark, Marks
from t2g.tasks.base import get_task
from t2g.types import Span

NUM_PROMPTS = 30


def mark_all(data: Path, by: str, end: int) -> Path:
    """Mark the first `end` characters of each response as poor; return the person's records."""
    samples = make_samples(load_records(DataConfig(path=str(data))), get_task("prompts"))
    folder = data.with_suffix(".marks")
    with closing(Marks(folder, by, samples)) as marks:
        for index in range(len(samples)):
            marks.put(index, Mark(critique=f"{by} dislikes it.", spans=(Span(start=0, end=end, label=-1),), done=True))
    return folder / by / RECORDS_FILE


def test_two_peoples_marks_become_one_record_for_each_response(tmp_path: Path) -> None:
    """In a list of files and in a joined file; half of the responses are the second ones to their prompt."""
    data = tmp_path / "responses.jsonl"
    rows = [
        {"prompt": f"p{number % NUM_PROMPTS}", "response": f"one two {number}"} for number in range(2 * NUM_PROMPTS)
    ]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [mark_all(data, "ann", 3), mark_all(data, "bob", 7)]
    joined = tmp_path / "joined.jsonl"
    joined.write_bytes(b"".join(file.read_bytes() for file in files))
    for name, paths in (("list", [*map(str, files)]), ("joined", str(joined))):
        config: dict[str, Any] = {
            "run": {"root": str(tmp_path / "runs"), "name": name},
            "data": {"path": paths},
            "annotate": {"source": "human", "heldout_share": 0.3},
        }
        records = annotate(config)
        assert [record["response"] for record in records] == [row["response"] for row in rows]
        assert [record["sample_index"] for record in records] == [0] * NUM_PROMPTS + [1] * NUM_PROMPTS
        assert {(span["start"], span["end"]) for record in records for span in record["spans"]} == {(0, 3)}
        assert {record["agreement"] for record in records} == {2 * 3 / (3 + 6)}  # without the blank
        parts = [
            load_annotated(DataConfig(path=str(tmp_path / "runs" / name / f"{part}.jsonl")))
            for part in ("train", "heldout")
        ]
        assert all(parts)
        assert sum(map(len, parts)) == 2 * NUM_PROMPTS
        assert not {record.prompt for record in parts[0]} & {record.prompt for record in parts[1]}
