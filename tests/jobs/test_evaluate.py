"""jobs.evaluate but for the engine: which model is asked for what, on which records, and what is left."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.common.run_folder import begin_folder
from jobs.evaluate.__main__ import evaluate
from jobs.evaluate.evaluations import EVALUATIONS
from jobs.train_reward.reward_models import evaluate_reward, usable_records, with_trained_style
from t2g.config import EvaluateJob, StyleConfig
from t2g.errors import UserError
from t2g.feedback.card import make_card, write_card
from t2g.feedback.parse import parse_answer
from t2g.feedback.records import AnnotatedRecord
from t2g.report.reward_page import EVALUATION_FILE, HTML_FILE
from t2g.tasks.base import get_task
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.text.tokenizer import check_model
from t2g.types import Prompt, SpanFeedback

NO_CRITIQUE = StyleConfig(critique=False, labels="dense")
RECORDS = [
    {"prompt_id": "1", "prompt": "p", "response": "ab cd", "critique": "c", "good": ["ab"], "poor": ["cd"]},
    {"prompt_id": "2", "prompt": "p", "response": "ef gh", "critique": "c", "poor": ["ef"]},
    {"prompt_id": "3", "prompt": "p", "response": "ij kl", "critique": "", "status": "failed"},
]


class Model:
    """Calls the first word good, whatever it is."""

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        answer = json.dumps({"critique": "the first", "good": [response_text.split()[0]], "poor": []})
        return parse_answer(answer, response_text, source="reward_model", version="v")

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        return parse_answer("no JSON", response_text, source="reward_model", version="v")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_card(folder, make_card(get_task("tiny"), NO_CRITIQUE))
    return folder


def job(tmp_path: Path, model: str | Path, records: list[dict[str, Any]] = RECORDS, **fields: Any) -> EvaluateJob:
    data = tmp_path / "heldout.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    feedback = {"reward_model": str(model), **fields.pop("feedback", {})}
    run = {"root": tmp_path / "runs", "name": "evaluation", **fields.pop("run", {})}
    return EvaluateJob.model_validate({"run": run, "data": {"path": str(data)}, "feedback": feedback, **fields})


def test_task_and_style_are_those_of_the_models_card(tmp_path: Path, model: Path) -> None:
    config = with_trained_style(job(tmp_path, model))
    assert (config.task, config.feedback.style) == ("tiny", NO_CRITIQUE)


def test_what_the_config_says_is_left_for_the_server_to_refuse(tmp_path: Path, model: Path) -> None:
    sparse = {"critique": True, "labels": "sparse"}
    config = with_trained_style(job(tmp_path, model, task="prompts", feedback={"style": sparse}))
    assert (config.task, config.feedback.style) == ("prompts", StyleConfig())


def test_models_without_a_card_follow_the_config(tmp_path: Path) -> None:
    for name in (str(tmp_path), "someone/reward-model"):
        config = job(tmp_path, name)
        assert with_trained_style(config) == config


@pytest.mark.parametrize("name", ["runs/demo/reward/model", "./model", "/no/model"])
def test_a_path_to_nothing_is_no_name_on_the_hub(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the working folder may hold what a demo has left
    with pytest.raises(UserError, match=f"feedback.reward_model={name}: there is no folder of that name"):
        check_model("feedback.reward_model", name)


def records_of(config: EvaluateJob) -> list[AnnotatedRecord]:
    return usable_records("data.path", config.data, config.task)


def test_only_records_with_usable_feedback_are_judged(tmp_path: Path) -> None:
    assert [record.prompt_id for record in records_of(job(tmp_path, "m"))] == ["1", "2"]
    with pytest.raises(UserError, match=r"heldout.jsonl has no record with feedback that could be used"):
        records_of(job(tmp_path, "m", RECORDS[2:]))


def test_a_smoke_run_asks_about_three(tmp_path: Path) -> None:
    config = job(tmp_path, "m", [{**RECORDS[0], "prompt_id": str(i)} for i in range(9)], run={"smoke": True})
    tokenizer = build_tokenizer(tmp_path / "tokenizer", ["x"], vocab_size=261)
    assert evaluate_reward(config, records_of(config), Model(), tokenizer, tmp_path)["num_records"] == 3


def test_the_report_lies_in_the_run_folder(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = with_trained_style(job(tmp_path, model))
    folder = begin_folder(config)
    tokenizer = build_tokenizer(tmp_path / "tokenizer", ["x"], vocab_size=261)  # a token a byte
    metrics = evaluate_reward(config, records_of(config), Model(), tokenizer, folder)
    # good: "ab" is right and "ef" is not; poor: of "cd" and "ef" none is found
    assert (metrics["good_precision"], metrics["good_recall"], metrics["poor_recall"]) == (0.5, 1.0, 0.0)
    assert (metrics["parse_rate"], metrics["usable_rate"], metrics["num_records"]) == (0.0, 1.0, 2)
    result = json.loads((folder / EVALUATION_FILE).read_text())
    assert result["metrics"] == metrics
    assert (result["reward_model"], result["task"]) == (str(model), "tiny")
    assert result["style"] == "without a critique, dense labels"
    assert result["errors"]["wrong_label"]["examples"][0]["what"] == ["ef"]
    assert "the first" in (folder / HTML_FILE).read_text()
    warning = "None of the reward model's 2 answers parses without guided decoding"
    output = capsys.readouterr().out
    assert result["warning"] in output and result["warning"].startswith(warning)
    assert "2 answers parses without guided decoding" in (folder / HTML_FILE).read_text()


def test_help_without_what_lists_all_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(["--help"]) == 0
    overview = capsys.readouterr().out
    assert {what: f"--what {what} --help" in overview for what in EVALUATIONS} == dict.fromkeys(EVALUATIONS, True)


def test_what_is_not_known_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        evaluate(["--what", "data", "--config", "x.yaml"])
    assert caught.value.code == 2 and "invalid choice: 'data'" in capsys.readouterr().err


def test_the_rest_of_the_command_line_is_the_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "evaluate.yaml"
    config.write_text("data: {path: my.jsonl}\nfeedback: {reward_model: my/model}\n")
    assert evaluate(["--config", str(config), "run.name=mine", "--what", "reward", "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert "reward model: my/model\nheld-out records: my.jsonl" in out and "/mine\n" in out
    assert "- feedback.reward_model=my/model: " in err and "- data.path=my.jsonl: there is no such file" in err
