"""`t2g evaluate RUN` and `t2g serve RUN`: the config of a run, and scores by the run's own feedback function."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import random_model

from jobs.common.cli import StopFlag
from jobs.evaluate.__main__ import evaluate, find_what
from jobs.evaluate.feedback_scores import FOLDER
from jobs.evaluate.policy_evaluation import Evaluation
from t2g.config import ModelConfig, PolicyEvaluationJob, PolicyJob, RewardJob, ServeJob, loading
from t2g.config.run_values import evaluation_values, serving_values
from t2g.errors import RunStopped, UserError
from t2g.feedback.sources.make import make_local_source
from t2g.interfaces import FeedbackSource, Sampling
from t2g.tasks.base import get_task
from t2g.types import Prompt, Rollout

FUNCTION = """
judged = []
def judge(prompt, response, payload):
    judged.append(response)
    if response == payload.get("broken"):
        raise ValueError("no judgement today")
    good = [word for word in response.split() if word == "good"]
    poor = [(word, 1) for word in response.split() if word == "bad"]
    return f"about {payload['topic']}", good, poor
"""
SAYS = {"base": ["bad", "good bad", ""], "policy": ["good", "good bad", "fine"]}  # to prompts 0, 1, 2


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of the task prompts with a feedback function of the user."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_runs_judge", raising=False)
    (tmp_path / "of_runs_judge.py").write_text(FUNCTION)
    rows = [{"prompt": f"p{number}", "topic": "tea"} for number in range(3)]
    (tmp_path / "heldout.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    random_model(tmp_path / "base", "llama", seed=1)
    folder = tmp_path / "runs" / "mine"
    random_model(folder / "policy", "llama", seed=2)
    files = {
        "run": {"root": tmp_path / "runs", "name": "mine", "seed": 5},
        "model": {"policy": str(tmp_path / "base")},
        "data": {"path": str(tmp_path / "train.jsonl")},
        "eval_data": {"path": str(tmp_path / "heldout.jsonl"), "too_long": "skip"},
    }
    settings = {
        "feedback": {"source": "of_runs_judge:judge"},
        "rollout": {"temperature": 0.7, "max_new_tokens": 32, "max_model_len": 128},
        "objective": {"rewards": {"poor": [-3, -3, -3]}},
        "eval": {"samples_per_prompt": 2, "num_prompts": 50},
    }
    loading.write(PolicyJob.model_validate(files | settings), folder)
    return folder


class Engine:
    """Answers each prompt as SAYS says for the model's folder."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samplings = list[Sampling]()

    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        self.samplings.append(sampling)
        text = SAYS[self.name][int(prompt.prompt_text[1:])]
        rollout = Rollout(
            prompt_id=prompt.prompt_id, sample_index=0, prompt_ids=prompt.prompt_ids,
            response_ids=np.zeros(1, np.int32), rollout_logprobs=np.zeros(1, np.float32), response_text=text,
            finish_reason="stop", policy_versions=((0, 1, 0),),
        )  # fmt: skip
        return [replace(rollout, sample_index=index) for index in range(sampling.num_samples)]


def load(folder: Path, *overrides: str) -> PolicyEvaluationJob:
    return loading.load(PolicyEvaluationJob, evaluation_values(folder), overrides)


def measure(config: PolicyEvaluationJob) -> tuple[dict[str, Any], dict[str, Engine]]:
    engines = {name: Engine(name) for name in SAYS}

    @contextmanager
    def serve(model: ModelConfig) -> Iterator[Engine]:
        yield engines[Path(model.policy).name]

    @contextmanager
    def serve_feedback() -> Iterator[FeedbackSource]:
        assert config.feedback is not None
        yield make_local_source(config.feedback, get_task(config.task))

    return Evaluation(config).run(serve, StopFlag(), serve_feedback), engines


def test_a_runs_policy_is_scored_by_the_runs_feedback_function(finished: Path) -> None:
    """A score is the spans' rewards by their absolute sum: -3/3 and (1 - 3)/4 for the base, and 0 without a span."""
    config = load(finished)
    result, engines = measure(config)
    assert config.run.folder == finished / "evaluation"
    scores = {name: figures["feedback"]["value"] for name, figures in result["policies"].items()}
    assert scores == {"base": pytest.approx((-1 - 0.5 + 0) / 3), "policy": pytest.approx((1 - 0.5 + 0) / 3)}
    (pair,) = [pair for pair in result["pairs"] if pair["measure"] == "feedback"]
    assert (pair["policy"], pair["against"], pair["value"]) == ("policy", "base", pytest.approx(2 / 3))
    assert next(iter(result["policies"]["base"])) == "feedback"
    assert result["feedback"] == "of_runs_judge:judge"
    sampling = engines["policy"].samplings[0]
    assert (sampling.num_samples, sampling.temperature, sampling.max_new_tokens) == (2, 0.7, 32)
    rows = [json.loads(line) for line in (config.run.folder / FOLDER / "policy.jsonl").read_text().splitlines()]
    assert {record["critique"] for row in rows for record in row["records"]} == {"about tea"}
    assert "about tea" in (config.run.folder / "evaluation.html").read_text()


def test_a_finished_evaluation_starts_no_engines(finished: Path) -> None:
    first, _ = measure(load(finished))

    def refuse(*_: Any) -> Any:
        raise AssertionError("nothing is missing")

    again = Evaluation(load(finished)).run(refuse, StopFlag(), refuse)
    assert again["policies"] == first["policies"]


def test_the_same_command_asks_for_failed_judgements_again(finished: Path, tmp_path: Path) -> None:
    data = tmp_path / "heldout.jsonl"
    rows = [{"prompt": f"p{number}", "topic": "tea", "broken": "bad"} for number in range(3)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(RunStopped, match=r"no usable feedback on 2 of 6 responses of base .*no judgement today"):
        measure(load(finished, "feedback.max_failed_share=0.3"))
    result, engines = measure(load(finished))
    assert engines["base"].samplings == [], "the responses are kept"
    assert result["policies"]["base"]["unjudged"]["value"] == pytest.approx(1 / 3)
    assert result["policies"]["base"]["feedback"]["value"] == pytest.approx((0 - 0.5 + 0) / 3)
    (tmp_path / "of_runs_judge.py").write_text(FUNCTION.replace("raise ValueError", "return 'x', [], []  # "))
    del sys.modules["of_runs_judge"]
    assert measure(load(finished))[0]["policies"]["base"]["unjudged"]["value"] == 0


def test_a_good_judgement_beside_a_failed_one_is_not_requested_again(finished: Path, tmp_path: Path) -> None:
    data = tmp_path / "heldout.jsonl"
    rows = [{"prompt": f"p{number}", "topic": "tea", "broken": "bad"} for number in range(3)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fails_once = FUNCTION.replace('payload.get("broken")', 'payload.get("broken") and judged.count("bad") == 1')
    (tmp_path / "of_runs_judge.py").write_text(fails_once)
    with pytest.raises(RunStopped, match="no usable feedback on 1 of 6 responses of base"):
        measure(load(finished, "feedback.max_failed_share=0.1"))
    judged = sys.modules["of_runs_judge"].judged
    assert judged.count("bad") == 2
    measure(load(finished, "feedback.max_failed_share=0.1"))
    assert judged.count("bad") == 3


def test_the_command_takes_the_folder(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([str(finished), "--dry-run", "rollout.samples_per_prompt=1"]) == 0
    printed = capsys.readouterr().out
    assert "policies: base, policy" in printed and "feedback: of_runs_judge:judge" in printed
    assert f"run folder: {finished}/evaluation" in printed and "1 response to each prompt" in printed


def test_a_run_without_held_out_prompts_is_measured_on_its_own(
    finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = loading.load(PolicyJob, finished / "config.yaml", ["eval_data=null", "data.limit=2"])
    loading.write(config, finished)
    data = load(finished).data
    assert (data.path, data.limit) == (config.data.path, 2)
    assert "data.path=FILE" in caplog.text


def test_the_folder_decides_what_is_evaluated(finished: Path, tmp_path: Path) -> None:
    reward = {
        "run": {"root": tmp_path / "runs", "name": "reward"},
        "model": {"policy": str(tmp_path / "base")},
        "data": {"path": "train.jsonl"},
        "eval_data": {"path": "heldout.jsonl"},
    }
    folder = tmp_path / "runs" / "reward"
    loading.write(RewardJob.model_validate(reward), folder)
    random_model(folder / "model", "llama", seed=3)
    assert find_what([str(finished), "a=b"]) == "policy"
    assert find_what(["a=b", str(folder)]) == "reward"
    assert find_what(["--config", "c.yaml"]) == "reward"
    assert find_what(["--what", "teacher", str(finished)]) == "teacher"
    values = evaluation_values(folder)
    assert values["feedback"]["reward_model"] == str(folder / "model")
    assert values["data"]["path"] == "heldout.jsonl"
    assert values["data"]["limit"] == 200


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{}/nothing"], "it has no config.yaml; name the folder of a run"),
        (["{}/unfinished"], "it has no policy yet; finish the run by its own command"),
        (["{}/turns"], "environment=code_repair replies to the policy"),
        (["{}/mine", "--what", "reward"], "--what is reward, and the run trained a policy"),
    ],
)
def test_a_folder_that_cannot_be_evaluated_is_one_sentence(
    finished: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    config = loading.load(PolicyJob, finished / "config.yaml")
    loading.write(config, finished.parent / "unfinished")
    loading.write(
        loading.load(PolicyJob, finished / "config.yaml", ["environment=code_repair"]), finished.parent / "turns"
    )
    assert evaluate([text.format(finished.parent) for text in arguments]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and len(printed.splitlines()) == 1


def test_the_best_policy_of_an_unfinished_run_is_named_without_a_key(finished: Path) -> None:
    """The values of the run are refused before an override is read, and `t2g serve` has another key."""
    (finished / "policy" / "config.json").unlink()
    best = finished / "checkpoints" / "best"
    best.mkdir(parents=True)
    for make_values in (evaluation_values, serving_values):
        with pytest.raises(UserError) as refusal:
            make_values(finished)
        assert str(best) in str(refusal.value)
        assert "=" not in str(refusal.value)


def test_either_a_folder_or_a_config(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(finished), "--config", "a.yaml"]):
        with pytest.raises(SystemExit):
            evaluate(arguments)
        assert "needs either the folder of a run or --config FILE" in capsys.readouterr().err


def test_a_runs_policy_is_served_on_the_runs_engines(finished: Path) -> None:
    config = loading.load(ServeJob, serving_values(finished), ["serve.port=8001"])
    assert (config.model.policy, config.run.folder) == (str(finished / "policy"), finished / "server")
    assert (config.engine.max_model_len, config.serve.port) == (128, 8001)
