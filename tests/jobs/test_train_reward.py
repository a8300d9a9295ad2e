"""What the reward job reads before anything is started."""

from pathlib import Path

import pytest

from jobs.train_reward import read_data
from t2g.config import RewardJob
from t2g.data.records import read_record, write_annotated
from t2g.errors import UserError
from t2g.feedback.offsets import decode
from t2g.sections import StyleConfig
from t2g.tasks.tiny_assets import build_tokenizer


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
    ("style", "asked", "answer"),
    [
        (StyleConfig(), "Judge the summary.", '{"critique": "It is.", "good": ["ab"], "poor": []}'),
        (StyleConfig(critique=False), "Quote from the summary.", '{"good": ["ab"], "poor": []}'),
    ],
)
def test_the_style_decides_question_and_answer(tmp_path: Path, style: StyleConfig, asked: str, answer: str) -> None:
    data = read_data(job(tmp_path, style))
    assert len(data.examples) == 2
    assert decode(data.tokenizer, data.examples[0].prompt_ids).startswith(asked)
    assert decode(data.tokenizer, data.examples[0].target_ids) == answer


def test_records_without_usable_feedback_are_not_measured_on(tmp_path: Path) -> None:
    config = job(tmp_path, StyleConfig(), status="failed")
    data = read_data(config)
    assert [record.status for record in data.heldout] == ["ok", "ok"]
    write_annotated(tmp_path / "heldout.jsonl", [data.heldout[0].model_copy(update={"status": "unparsable"})])
    with pytest.raises(UserError, match=r"heldout\.jsonl has no record with feedback that could be used"):
        read_data(config)
