"""What the reward job reads before anything is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.annotate.annotation_runs import DONE_FILE
from jobs.train_reward.reward_models import read_data
from t2g.config import RewardJob, StyleConfig
from t2g.errors import UserError
from t2g.feedback.card import format_style
from t2g.feedback.records import read_record, write_annotated
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.text.offsets import decode


def job(tmp_path: Path, style: StyleConfig, *, status: str = "ok") -> RewardJob:
    """Two records to learn from; three held out, of which the middle one's feedback is of the given status."""
    build_tokenizer(tmp_path / "model", ["x"], vocab_size=261)  # a token a byte
    row = {"prompt": "p", "response": "ab cd", "critique": "It is.", "good": ["ab"], "poor": []}
    record = read_record(row)
    write_annotated(tmp_path / "train.jsonl", [record, record])
    write_annotated(tmp_path / "heldout.jsonl", [record, read_record({**row, "status": status}), record])
    return RewardJob.model_validate(
        {
            "task": "tiny",
            "model": {"policy": str(tmp_path / "model")},
            "data": {"path": str(tmp_path / "train.jsonl")},
            "eval_data": {"path": str(tmp_path / "heldout.jsonl")},
            "style": style,
            "eval_records": 2,
        }
    )


@pytest.mark.parametrize(
    ("style", "question", "answer"),
    [
        (StyleConfig(), "Judge the summary.", '{"critique": "It is.", "good": ["ab"], "poor": []}'),
        (StyleConfig(critique=False), "Quote from the summary.", '{"good": ["ab"], "poor": []}'),
    ],
)
def test_the_style_decides_question_and_answer(tmp_path: Path, style: StyleConfig, question: str, answer: str) -> None:
    data = read_data(job(tmp_path, style))
    assert len(data.examples) == 2
    assert decode(data.tokenizer, data.examples[0].prompt_ids).startswith(question)
    assert decode(data.tokenizer, data.examples[0].response_ids) == answer


def test_a_critique_is_not_learned_from_records_without_one(tmp_path: Path) -> None:
    config = job(tmp_path, StyleConfig())
    record = read_record({"prompt": "p", "response": "ab cd", "critique": "It is.", "good": ["ab"]})
    blank = record.model_copy(update={"critique": " "})
    failed = record.model_copy(update={"status": "failed"})
    write_annotated(tmp_path / "train.jsonl", [blank, failed])
    with pytest.raises(UserError, match=r"train\.jsonl: style\.critique is on, and no record that could be used has"):
        read_data(config)
    assert len(read_data(config.model_copy(update={"style": StyleConfig(critique=False)})).examples) == 1
    write_annotated(tmp_path / "train.jsonl", [blank, record])
    assert len(read_data(config).examples) == 2


def test_targets_that_the_served_model_cannot_write_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guided decoding would cut the quote, and the span would end elsewhere."""
    config = job(tmp_path, StyleConfig())
    long = read_record({"prompt": "p", "response": "ab " * 60, "critique": "It is.", "good": ["ab " * 55]})
    short = read_record({"prompt": "p", "response": "ab cd", "critique": "It is.", "good": ["ab"]})
    write_annotated(tmp_path / "train.jsonl", [short, long, short])
    read_data(config)
    (message,) = [text for text in caplog.messages if "served model can write" in text]
    assert "1 of 3 records" in message and "engine.max_quote_chars" in message
    caplog.clear()
    roomy = config.engine.model_copy(update={"max_quote_chars": 200})
    read_data(config.model_copy(update={"engine": roomy}))
    assert not [text for text in caplog.messages if "served model can write" in text]


SPARSE = StyleConfig()
DENSE = StyleConfig(labels="dense")
BARE = StyleConfig(critique=False)


@pytest.mark.parametrize(("recorded", "job_style"), [(SPARSE, DENSE), (DENSE, SPARSE), (BARE, SPARSE)])
def test_records_of_another_style_are_refused(tmp_path: Path, recorded: StyleConfig, job_style: StyleConfig) -> None:
    config = job(tmp_path, job_style)
    (tmp_path / DONE_FILE).write_text(json.dumps({"records": 2, "style": recorded.model_dump()}))
    with pytest.raises(UserError) as refused:
        read_data(config)
    assert f"data.path={tmp_path}/train.jsonl holds feedback {format_style(recorded)}" in str(refused.value)
    assert f"beside it), not {format_style(job_style)};" in str(refused.value)


@pytest.mark.parametrize(
    ("recorded", "job_style"),
    [
        ({"style": SPARSE.model_dump()}, SPARSE),
        ({"style": SPARSE.model_dump()}, BARE),  # the critique is left out
        ({"records": 2}, DENSE),
        ([{"style": 3}], DENSE),  # somebody else's file
    ],
)
def test_records_of_the_same_or_an_unknown_style_are_taken(
    tmp_path: Path, recorded: Any, job_style: StyleConfig
) -> None:
    config = job(tmp_path, job_style)
    (tmp_path / DONE_FILE).write_text(json.dumps(recorded))
    assert len(read_data(config).examples) == 2


def test_records_without_usable_feedback_are_not_measured_on(tmp_path: Path) -> None:
    config = job(tmp_path, StyleConfig(), status="failed")
    data = read_data(config)
    assert [record.status for record in data.heldout] == ["ok", "ok"]
    write_annotated(tmp_path / "heldout.jsonl", [data.heldout[0].model_copy(update={"status": "unparsable"})])
    with pytest.raises(UserError, match=r"heldout\.jsonl has no record with feedback that could be used"):
        read_data(config)
