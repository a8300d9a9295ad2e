"""The command line of jobs.deploy without a cluster; tests/integration/test_deploy_live.py has the rest."""

import json
from pathlib import Path

import pytest
from models import random_model

from jobs import deploy
from t2g.config import PolicyJob, loading
from t2g.runs.control import Status, TargetSizes, now, read_target_sizes, write_status


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of runs with the run `own`."""
    config = PolicyJob.model_validate(
        {
            "run": {"root": tmp_path, "name": "own"},
            "model": {"policy": "some/policy"},
            "data": {"path": "prompts.jsonl"},
            "rollout": {"workers": {"min": 1, "max": 4}},
            "feedback": {"source": "program"},
        }
    )
    loading.write(config, tmp_path / "own")
    return tmp_path


def command(*words: object) -> int:
    return deploy.main([str(word) for word in words])


def test_scale_writes_down_what_the_run_reads(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("scale", "--run", "own", "--root", root, "--rollouts", 3) == 0
    assert read_target_sizes(root / "own") == TargetSizes(rollouts=3)
    assert capsys.readouterr().out == "run own has the target 3 rollouts\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--run", "own", "--rollouts", "5"], "rollouts: got 5, and rollout.workers of this run allows 1 to 4"),
        (["--run", "own", "--rewards", "2"], "feedback.source=program has no engines"),
        (["--run", "own"], "rollouts or rewards needs a number"),
        (["--run", "nobody", "--rollouts", "2"], "nobody holds no run"),
    ],
)
def test_what_cannot_be_scaled_is_the_users_to_mend(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert command("scale", "--root", root, *words) == 2
    assert sentence in capsys.readouterr().err
    assert read_target_sizes(root / "own") is None


def test_status_for_eyes_and_for_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("status", "--run", "own", "--root", root) == 2
    assert "status.json is not there" in capsys.readouterr().err
    write_status(root / "own", Status(step=2, num_steps=9, samples=16, updated=now()))
    assert command("status", "--run", "own", "--root", root) == 0
    assert capsys.readouterr().out.startswith("run own: step 2 of 9, 16 samples, as of ")
    assert command("status", "--run", "own", "--root", root, "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 16


@pytest.mark.parametrize(
    "words",
    [
        ["submit", "--config", "configs/own/policy.yaml", "run.root=here", "--no-wait", "num_steps=2"],
        ["submit", "run.root=here", "num_steps=2", "--config", "configs/own/policy.yaml"],
    ],
)
def test_overrides_may_stand_before_and_behind_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["model.policy=some/model", "data.path=x.jsonl", "feedback.source=program"]
    assert command(*words, *overrides) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "run.root: got 'here', but a Ray job needs an absolute path" in error


@pytest.mark.parametrize(
    "words", [[], ["launch"], ["scale"], ["submit"], ["scale", "--run", "own", "--rollouts", "many"]]
)
def test_a_wrong_command_line_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command(*words)
    assert refused.value.code == 2
    assert "usage: python -m jobs.deploy" in capsys.readouterr().err


def test_every_subcommand_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    _, commands = deploy.parsers()
    assert set(commands) == {"check", "render", "submit", "status", "scale", "stop", "doctor"}
    for name, parser in commands.items():
        assert parser.description and parser.prog == f"python -m jobs.deploy {name}"
    with pytest.raises(SystemExit) as requests:
        command("--help")
    listed = capsys.readouterr().out
    assert requests.value.code == 0
    assert all(f"    {name} " in listed for name in commands)


def test_no_cluster_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("stop", "--run", "own", "--address", "http://127.0.0.1:9") == 2
    assert "no Ray job server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_check_fails_on_what_cannot_run_and_tells_it_from_what_is_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "check_functions.py").write_text("def judge(response): ...\n")
    base = ["check", "--config", "configs/slf5k/policy.yaml", "data.path=/mnt/t2g/x.json", "model.policy=./no"]
    assert command(*base, "feedback={source: program}") == 1
    assert "problem: task summarization has no program of its own" in capsys.readouterr().out
    assert command(*base, "feedback={source: 'check_functions:judge'}") == 1
    assert "problem: feedback.source=check_functions:judge cannot be called with" in capsys.readouterr().out
    assert command(*base, "feedback={source: 'nowhere_at_all:judge'}") == 0, "another machine may have it"
    assert "not here: feedback.source=nowhere_at_all:judge cannot be imported" in capsys.readouterr().out
    sft = ["check", "--job", "sft", "--config", "configs/own/sft.yaml", "sft={gpus: 1, workers: 1}", "--gpu", "24"]
    assert command(*sft, "model.policy=Qwen/Qwen2.5-1.5B-Instruct", "data.path=/mnt/t2g/x.jsonl") == 1
    output = capsys.readouterr().out
    assert "sft: about " in output and "GiB on a GPU of 24; lower sft.tokens_per_microbatch" in output


def test_render_refuses_what_no_pod_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("render", "--config", "configs/slf5k/policy.yaml", "data.path=/home/me/x.json") == 2
    error = capsys.readouterr().err
    assert "data.path is /home/me/x.json: pods see /mnt/t2g" in error
    assert "feedback.reward_model is runs/slf5k-reward/model: pods see /mnt/t2g" in error


def test_check_resolves_auto_with_a_gpu_for_each_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The starter's own config; auto counts two GPUs, one for its engine and one for its rank."""
    starter = Path(deploy.__file__).parent / "starter" / "policy.yaml"
    random_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why?"}\n')
    overrides = [
        f"model.policy={tmp_path / 'model'}",
        f"data.path={tmp_path / 'prompts.jsonl'}",
        "feedback.source=program",
    ]
    command("check", "--config", starter, "--gpu", "L4", *overrides, f"run.root={tmp_path}")
    captured = capsys.readouterr()
    assert "learner: 1 rank of 1 GPU -> 1 pod;" in captured.out
    assert "rollout: 1 engine of TP 1 -> 1 pod;" in captured.out
    assert "(L4)" in captured.out and "got auto" not in captured.err
    assert "warning: t2g deploy render refuses this config: " in captured.out and "learner.gpus" in captured.out
    command("check", "--config", "configs/tiny/policy.yaml")
    assert "refuses this config" not in capsys.readouterr().out
    assert "2 GPUs): rollout.gpus=1.0" in caplog.text and 'learner.dtype="bfloat16"' in caplog.text
