"""One collector for all journals: it goes on with the lines of earlier versions, and stops within its limits."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeFeedback

from jobs.annotate.annotation_runs import JOURNAL_FILE, known_records
from jobs.common.cli import StopFlag
from jobs.common.journals import ConcurrencyLimit, Limits, make_missing_rows, read_rows
from jobs.evaluate.feedback_scores import JudgedResponses
from t2g.config import AnnotateJob
from t2g.errors import RunStopped, SamplingFailed
from t2g.feedback.records import AnnotatedRecord
from t2g.loop.annotation import Annotator, Sample, make_samples
from t2g.study.pairwise import PairwiseJudgement
from t2g.study.policy_eval import Answers, Scores
from t2g.tasks.prompts_only import PromptsTask

# As version 0.2.0 wrote them.
RECORD = (
    '{"prompt_id":"a","prompt":"Why?","response":"ab","critique":"a yes, b no","good":["a"],"poor":["b"],'
    '"spans":[{"start":0,"end":1,"label":1,"severity":1,"critique_range":[0,11]},'
    '{"start":1,"end":2,"label":-1,"severity":1,"critique_range":[0,11]}],"status":"ok","reason":"",'
    '"source":"program","version":"fake","execution":{},"agreement":null,"num_quotes":2,"num_located":2,'
    '"task":"prompts","sample_index":0,"payload":{"response":"ab"}}'
)
FAILED = RECORD.replace('"status":"ok"', '"status":"failed"')
OLD_ROWS: list[tuple[type[Any], str]] = [
    (Answers, '{"prompt_id":"a","key":"k1","responses":[{"text":"so","cut":false}]}'),
    (Scores, '{"prompt_id":"a","key":"k1","scores":[{"rougeL":0.30000000000000004}]}'),
    (
        PairwiseJudgement,
        '{"key":"k1","judge":"j","prompt_id":"a","first":"x","second":"y","verdict":"A","reason":"longer"}',
    ),
    (JudgedResponses, f'{{"prompt_id":"a","key":"k1","records":[{RECORD}]}}'),
]


class RowMaker:
    """Makes rows of a schema like the old one, and keeps their keys."""

    def __init__(self, schema: type[Any], line: str) -> None:
        self.old = schema.model_validate_json(line)
        self.keys: list[str] = []

    async def __call__(self, key: str, item: Any) -> Any:
        self.keys.append(key)
        return self.old.model_copy(update={"key": key, "prompt_id": item})


@pytest.mark.parametrize(("schema", "line"), OLD_ROWS)
def test_a_journal_of_an_evaluation_goes_on(tmp_path: Path, schema: type[Any], line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{line}\n")
    make_row = RowMaker(schema, line)
    items = {"k2": "b", "k1": "a", "k3": "c"}
    collect_rows = partial(
        make_missing_rows, path, "rows", items, make_row,
        read=partial(read_rows, path, schema), limits=Limits(2, 1.0), stop=StopFlag(),
    )  # fmt: skip
    rows = collect_rows()
    assert make_row.keys == ["k2", "k3"]
    assert [(key, row.prompt_id) for key, row in rows.items()] == [*items.items()]
    assert rows["k1"] == make_row.old

    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == json.loads(line) and len(lines) == 3
    assert schema.model_validate_json(lines[1]) == make_row.old.model_copy(update={"key": "k2", "prompt_id": "b"})
    assert collect_rows() == rows and make_row.keys == ["k2", "k3"]


def make_annotation(folder: Path) -> tuple[AnnotateJob, dict[str, Sample]]:
    config = AnnotateJob.model_validate(
        {
            "run": {"root": folder, "name": "old"},
            "data": {"path": str(folder / "data.jsonl")},
            "annotate": {"source": "my.feedback:judge"},
        }
    )
    rows = [{"id": name, "prompt": "Why?", "response": "ab"} for name in "abc"]
    samples = make_samples(rows, PromptsTask())
    return config, {sample.key: sample for sample in samples}


def test_the_journal_of_an_annotation_goes_on(tmp_path: Path) -> None:
    config, samples = make_annotation(tmp_path)
    path = config.run.folder / JOURNAL_FILE
    path.parent.mkdir(parents=True)
    path.write_text(f'{RECORD}\n{{"prompt_id": "b", "prom')
    source = FakeFeedback()
    judged: list[str] = []
    source.before_judge = lambda prompt: judged.append(prompt.prompt_id)
    source.failing = lambda prompt: prompt.prompt_id == "c"
    annotator = Annotator(source)
    collect_records = partial(
        make_missing_rows, path, "annotate", samples, annotator.judge,
        read=partial(known_records, config, [*samples.values()]), limits=Limits(2, 1.0), stop=StopFlag(),
        prepare=annotator.respond, is_recorded=lambda record: record.status != "failed",
    )  # fmt: skip
    records: dict[str, AnnotatedRecord] = collect_records()
    assert judged == ["b", "c"]
    assert [record.status for record in records.values()] == ["ok", "ok", "failed"]
    first, second = path.read_text().splitlines()  # a failed judgement is no line
    assert first == RECORD
    assert second == RECORD.replace('"prompt_id":"a"', '"prompt_id":"b"')
    collect_records()
    assert judged == ["b", "c", "c"]


def test_a_row_that_is_not_final_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt_id":"a","key":"k1","records":[{FAILED}]}}\n')
    make_row = RowMaker(*OLD_ROWS[-1])
    rows = make_missing_rows(
        path, "rows", {"k1": "a"}, make_row,
        read=partial(read_rows, path, JudgedResponses), limits=Limits(1, 1.0), stop=StopFlag(),
        is_final=lambda row: row.is_complete,
    )  # fmt: skip
    assert make_row.keys == ["k1"] and rows["k1"].is_complete
    assert len(path.read_text().splitlines()) == 2


def test_an_item_without_an_answer_does_not_end_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    schema, line = OLD_ROWS[0]
    make_row = RowMaker(schema, line)

    async def fail_first(key: str, item: Any) -> Any:
        if key == "k1":
            raise SamplingFailed("nobody answers")
        return await make_row(key, item)

    with pytest.raises(
        RunStopped, match=r"^rows: 1 of 3 got no answer \(first: nobody answers\); the same command asks again$"
    ):
        make_missing_rows(
            path, "rows", {"k1": "a", "k2": "b", "k3": "c"}, fail_first,
            read=partial(read_rows, path, schema), limits=Limits(1, 1.0), stop=StopFlag(),
        )  # fmt: skip
    assert [*read_rows(path, schema)] == ["k2", "k3"]


def test_after_the_close_nothing_begins_and_what_is_under_way_goes_on() -> None:
    limit = ConcurrencyLimit(2)
    finished: list[int] = []

    async def work(number: int) -> None:
        assert limit.num_in_flight <= 2
        if number == 3:
            limit.close()
        await asyncio.sleep(0)
        finished.append(number)

    async def run_all() -> None:
        await asyncio.gather(*(limit.run(work, number) for number in range(9)))

    asyncio.run(run_all())
    assert finished == [0, 1, 2, 3] and limit.num_in_flight == 0
