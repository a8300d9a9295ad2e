"""One word for all jobs, a folder that runs, and a wheel that holds both."""

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from configs import shipped
from jobs import __main__ as console
from jobs.starter.feedback import judge
from t2g.config import PolicyJob, loading
from t2g.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_every_job_has_a_word_and_every_word_a_job() -> None:
    files = {file.stem for file in (ROOT / "jobs").glob("*.py")} - {"__init__", "__main__"}
    packages = {file.parent.name for file in (ROOT / "jobs").glob("*/__main__.py")}
    assert sorted(console.MODULES.values()) == sorted([*files, *packages])
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"t2g": "jobs.__main__:main"}


def test_the_output_and_exit_code_of_a_job_are_passed_on(tmp_path: Path) -> None:
    requests = [sys.executable, "-m", "jobs", "report", str(tmp_path)]
    done = subprocess.run(requests, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "holds no finished step" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["--help"], 0), (["fly"], 2), (["init"], 2)])
def test_what_is_no_job_ends_at_once(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        console.main(words)
    assert ended.value.code == code
    captured = capsys.readouterr()
    assert "t2g" in captured.out + captured.err


def test_without_a_word_every_job_is_listed_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert set(listed) == {"init", *console.MODULES}
    assert listed["train"] == "  train      Train a policy by span-level PPO."
    assert [line for line in lines if line.endswith(":")] == [
        "Start:", "Feedback:", "Training:", "Results:", "Machines:",
    ]  # fmt: skip


def test_a_new_folder_has_all_that_a_run_reads_and_a_full_one_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert console.main(["init", str(folder)]) == 0
    assert {file.name for file in folder.iterdir()} == {"README.md", "feedback.py", "policy.yaml", "prompts.jsonl"}
    with pytest.raises(UserError, match=r"model\.policy is missing"):
        loading.load(PolicyJob, folder / "policy.yaml", environ={}, cwd=folder)
    config = loading.load(PolicyJob, folder / "policy.yaml", ["model.policy=my/model"], environ={}, cwd=folder)
    assert config.data.path == str(folder / "prompts.jsonl")
    assert config.feedback.source == "feedback:judge"
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert len(set(prompts)) == len(prompts) >= config.rollout.prompts_per_step
    (folder / "policy.yaml").write_text("mine")
    assert console.main(["init", str(folder)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert (folder / "policy.yaml").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.txt"
    file.write_text("mine")
    assert console.main(["init", str(file / "sub")]) == 2
    assert f"t2g init: {file / 'sub'} cannot be written: Not a directory" in capsys.readouterr().err


def test_the_starter_function_blames_what_says_nothing_and_what_was_said() -> None:
    text = "It is very old. It hums. It hums."
    critique, good, poor = judge("Why?", text)
    assert [text[start:end] for start, end in poor] == ["very", " It hums."]
    assert [text[start:end] for start, end in good] == ["It is very old.", " It hums."]
    assert "'very', 'It hums.'" in critique
    assert judge("Why?", " ")[1:] == ([], [])


def test_the_wheel_holds_configs_and_starts_the_demo_from_an_empty_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    empty = tmp_path / "empty"
    site = tmp_path / "site"
    empty.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in listed.stdout.split("\0"):
        if name.startswith(("t2g/", "actors/", "jobs/", "configs/", "pyproject", "README", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    quiet = {"capture_output": True, "text": True, "check": False, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", build], cwd=source, **quiet)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("t2g-*.whl")
    with zipfile.ZipFile(wheel) as package:
        names = set(package.namelist())
        package.extractall(site)
    configs = {str(file.relative_to(ROOT)) for file in shipped()}
    starter = {f"jobs/starter/{name}" for name in ("feedback.py", "policy.yaml", "prompts.jsonl", "README.md")}
    starter |= {
        f"jobs/starter/repair/{name}"
        for name in ("feedback.py", "annotate.yaml", "logs.jsonl", "policy.yaml", "programs.jsonl", "README.md")
    }
    starter |= {f"jobs/starter/tools/{name}" for name in ("desk.py", "policy.yaml", "questions.jsonl", "README.md")}
    assert configs | starter | {"t2g/report/page.html", "t2g/marking/mark.js", "t2g/deploy/kuberay.yaml.j2"} <= names
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from jobs.__main__ import main; main(['demo', '--dry-run'])"
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, cwd=empty, **quiet)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "world: 6,000 posts to train on, 512 held out" in done.stdout
    assert f"run folder: {empty}/runs/demo" in done.stdout
    assert not (empty / "runs").exists()
