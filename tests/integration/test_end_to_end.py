"""A user's own run on the real stack: Ray, a vLLM policy, a vLLM reward model, two ZeRO-3 ranks, SIGTERM and resume."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from own_runs import ROOT, command, logged_steps, make_folder, start
from registered_metrics import assert_registered

from jobs import __main__ as console
from jobs.common.cli import main
from jobs.train_policy.policy_job import READ_DATA, run_training
from t2g.config import PolicyJob

DEADLINE_S = 600
NUM_STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("own"))


def own_command(folder: Path, **overrides: object) -> list[str]:
    values = {
        "eval_data": f"{{path: {folder / 'prompts.jsonl'}, limit: 4}}",
        "num_steps": NUM_STEPS,
        "feedback.source": "reward_model",
        "feedback.reward_model": folder / "reward",
        "feedback.engine": "{max_model_len: 2048, max_new_tokens: 900, max_critique_chars: 24, max_spans: 0}",
        "feedback.max_failed_share": 1.0,
        "eval.every": 2,
        "checkpoint.every": 3,
        "objective.kl_coef": 0,  # as a term of the loss its rounding moves weights
        "objective.truncation_penalty": 0,
    }
    return command(folder, **(values | overrides))


@pytest.mark.slow  # two starts of a whole run; tests/test_restarts.py has the same on fakes
def test_a_run_killed_by_sigterm_goes_on_with_the_same_command(folder: Path) -> None:
    run = folder / "runs" / "own"
    log = folder / "log.txt"
    process = start(own_command(folder), log)
    deadline = time.monotonic() + DEADLINE_S
    while 1 not in logged_steps(run):
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=DEADLINE_S) == 143, log.read_text()[-4000:]
    done = logged_steps(run)
    assert done == list(range(len(done)))
    assert 2 <= len(done) <= NUM_STEPS
    assert (run / "checkpoints" / f"step-{done[-1]:08d}" / "manifest.json").exists()
    assert not (run / "summary.json").exists()

    process = start(own_command(folder), log)
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    assert logged_steps(run) == list(range(NUM_STEPS + 1))
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (NUM_STEPS, NUM_STEPS * 8)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert_registered(run)
    assert all(m["sync/probe_gap"] < 1e-3 and m["gap/logprob_mean"] < 1e-4 for m in metrics[1:])
    assert all(m["feedback/source/reward_model"] == 1.0 for m in metrics[1:])
    report = (run / "report.html").read_text()
    assert "http://" not in report and "https://" not in report

    from transformers import AutoModelForCausalLM

    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "policy", run / "policy"))
    moved = [name for name, p in before.named_parameters() if not p.equal(after.get_parameter(name))]
    assert all(m["tokens/neutral_share"] == 1 for m in metrics[1:])
    assert not moved  # without a span not a bit may move

    started = time.monotonic()
    assert start(own_command(folder), log).wait(timeout=60) == 0  # finished: says so at once
    assert time.monotonic() - started < 30
    changed = start(own_command(folder, **{"objective.lam": 0.5}), log)
    assert changed.wait(timeout=60) == 2
    assert "objective.lam (1.0 -> 0.5)" in log.read_text()


@pytest.mark.slow  # a whole start; tests/jobs/test_console.py has what `init` writes
def test_a_new_folder_makes_three_steps(folder: Path, tmp_path: Path) -> None:
    assert console.main(["init", str(tmp_path / "mine")]) == 0
    values = {"model.policy": folder / "policy", "rollout.max_model_len": 160, "rollout.max_new_tokens": 32}
    words = ["train", "--config", "policy.yaml", "run.smoke=true", *(f"{key}={value}" for key, value in values.items())]
    log = tmp_path / "log.txt"
    process = start([sys.executable, "-m", "jobs", *words], log, cwd=tmp_path / "mine", PYTHONPATH=str(ROOT))
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    run = tmp_path / "mine" / "runs" / "my-run" / "smoke"
    assert logged_steps(run) == [1, 2, 3]
    assert "smoke run done" in log.read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples"] == 3 * 8 * 4
    assert not summary["all_neutral"]


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"model.policy": "/no/such/model"}, "/no/such/model"),
    ({"rollout.max_model_len": 20}, "tokens and the window holds 4 before the response"),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED)
def test_an_impossible_setting_fails_with_one_sentence(
    overrides: dict[str, object],
    sentence: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    requests = own_command(folder, **{"run.name": "bad", **overrides})
    argv = requests[requests.index("--config") :]
    assert main(PolicyJob, run_training, read=READ_DATA, argv=argv) == 2
    error_output = capsys.readouterr().err
    assert sentence in error_output and "Traceback" not in error_output


def test_the_command_says_it(folder: Path, tmp_path: Path) -> None:
    """In a process of its own."""
    log = tmp_path / "log.txt"
    process = start(own_command(folder, **{"run.name": "bad", "learner.workers": 400}), log)
    assert process.wait(timeout=DEADLINE_S) == 2, log.read_text()[-4000:]
    log_text = log.read_text()
    assert "CPUs needed" in log_text and "Traceback" not in log_text, log_text
