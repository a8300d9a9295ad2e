"""A run in rounds, without engines: who serves which, what the reward model learns from, what is made once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.common import rounds
from jobs.common.policy_runs import PolicyData
from jobs.common.rounds import train_in_rounds
from t2g.config import DataConfig, PolicyJob, SFTJob
from t2g.feedback.card import CARD_FILE, read_card
from t2g.feedback.parse import make_feedback
from t2g.feedback.records import load_annotated
from t2g.tasks.base import get_task
from t2g.tasks.tiny.assets import build_tokenizers
from t2g.types import Prompt, Rollout, TrainSequence

STOP: Any = False


class Fleets:
    """Each answers with a response that names the reward model that serves; `annotator` judges."""

    def __enter__(self) -> "Fleets":
        return self

    def __exit__(self, *error: object) -> None: ...

    def for_policy(self, job: PolicyJob, task: Any) -> tuple["Fleets", str]:
        return self, str(job.feedback.reward_model)

    def feedback(self, config: Any, task: Any, job: Any) -> "Fleets":
        assert config.source == "pkg:annotator"
        return self

    async def sample(self, prompt: Prompt, sampling: Any) -> list[Rollout]:
        nothing = np.zeros(0, np.float32)
        return [
            Rollout(
                prompt_id=prompt.prompt_id, sample_index=0, prompt_ids=prompt.prompt_ids, response_text="in Lima.",
                response_ids=np.zeros(0, np.int32), rollout_logprobs=nothing, finish_reason="stop", policy_versions=(),
            )
        ]  # fmt: skip

    async def judge(self, prompt: Prompt, response_text: str) -> Any:
        return make_feedback("It says Lima: wrong.", [], ["Lima"], response_text, source="program", version="v")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    _, tokenizer = build_tokenizers(tmp_path)

    def train(config: PolicyJob, data: Any, rollouts: Any, feedback: str, stop: Any, until: int | None = None) -> Any:
        made.append((feedback, until))
        return {} if until else {"steps": config.num_steps}

    def supervise(job: SFTJob, examples: list[TrainSequence], *, title: str) -> dict[str, float]:
        made.append((job.model.policy, len(examples)))
        (job.run.folder / "model").mkdir()
        return {"loss": 0.5}

    for name, fake in (("train", train), ("supervise", supervise), ("Fleets", Fleets)):
        monkeypatch.setattr(rounds, name, fake)
    monkeypatch.setattr(rounds, "load_tokenizer", lambda folder, revision: tokenizer)  # of a folder that nobody made
    return made


def job(folder: Path, **changes: Any) -> PolicyJob:
    return PolicyJob.model_validate(
        {
            "run": {"root": str(folder), "name": "own"}, "task": "tiny", "model": {"policy": "base"}, "num_steps": 10,
            "data": {"path": "posts.jsonl"}, "feedback": {"reward_model": "first"}, **changes,
        }
    )  # fmt: skip


def data(count: int = 8) -> PolicyData:
    prompts = [
        Prompt(prompt_id=f"p{i}", prompt_ids=np.zeros(0, np.int32), prompt_text=f"Post {i}.", task="tiny")
        for i in range(count)
    ]
    return PolicyData(task=get_task("tiny"), tokenizer=None, prompts=prompts, eval_prompts=[])


def test_each_round_has_the_reward_model_that_learnt_from_the_one_before(tmp_path: Path, calls: list[Any]) -> None:
    refresh = {"rounds": 3, "samples": 5, "annotator": {"source": "pkg:annotator"}}
    config = job(tmp_path, refresh=refresh)
    second, third = (tmp_path / "own" / "rewards" / number for number in ("2", "3"))
    expected = [
        ("first", 3), ("first", 5),
        (str(second / "model"), 6), (str(second / "model"), 5),
        (str(third / "model"), None),
    ]  # fmt: skip
    assert train_in_rounds(config, data(), STOP) == {"steps": 10}
    assert calls == expected
    records = load_annotated(DataConfig(path=str(second / "records.jsonl")), get_task("tiny"))
    assert len({record.prompt_id for record in records}) == 5
    assert {quote.quote for record in records for quote in record.poor} == {"Lima"}
    assert read_card(second / "model") is not None
    assert train_in_rounds(config, data(), STOP) == {"steps": 10}
    assert calls[5:] == [expected[-1]]  # what was learnt is kept
    (second / "stage.json").unlink()
    (second / "model" / CARD_FILE).unlink()
    (second / "model").rmdir()
    train_in_rounds(config, data(), STOP)
    assert calls[6:] == [("first", 5), expected[-1]]  # what was judged as well: the first round is over


def test_without_refresh_there_is_one_round(tmp_path: Path, calls: list[Any]) -> None:
    assert train_in_rounds(job(tmp_path), data(), STOP) == {"steps": 10}
    assert calls == [("first", None)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"feedback": {"source": "program"}, "refresh": {}}, "feedback.source=program is none"),
        ({"refresh": {"rounds": 11}}, "refresh.rounds=11 are more than num_steps=10"),
    ],
)
def test_what_cannot_be_refreshed_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        job(tmp_path, **changes)
