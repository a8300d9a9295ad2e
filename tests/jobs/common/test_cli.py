"""One command line for all jobs: exit codes, sentences without tracebacks, help at once, signals that set a flag."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.common.cli import install_stop_flag, main, print_outputs, program_name
from jobs.common.run_folder import sole_process
from t2g.config import DemoJob, EvaluateJob, PolicyJob, RunConfig
from t2g.config.loading import load
from t2g.errors import RunStopped, UserError
from t2g.runs.progress import log_duration


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "demo.yaml"
    file.write_text(f"run: {{root: {tmp_path}}}\nnum_steps: 7\n")
    return str(file)


def never(_config: DemoJob) -> int:
    raise AssertionError("the job was run")


def words(config: DemoJob) -> str:
    return f"{config.num_steps} steps in words"


class RemoteUserError(UserError):
    """As Ray raises it on the driver: of the original's class, the remote traceback as text, the original inside."""

    def __init__(self, cause: UserError) -> None:
        super().__init__("ray::Worker.start()\n  File ...\n")
        self.cause = cause


def test_the_job_gets_its_config_and_its_code_is_the_exit_code(config: str) -> None:
    seen: list[DemoJob] = []
    assert main(DemoJob, seen.append, words, ["--config", config, "num_steps=9"]) == 0
    assert [job.num_steps for job in seen] == [9]
    assert main(DemoJob, lambda job: job.num_steps, words, ["num_steps=5", "--config", config, "world.seed=2"]) == 5


def test_a_dry_run_describes_the_config_and_runs_nothing(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DemoJob, never, words, ["--config", config, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "7 steps in words"


def test_the_resolved_config_is_printed_alone_and_can_be_loaded(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(DemoJob, never, words, ["--config", config, "--show-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load(DemoJob, file) == load(DemoJob, Path(config))


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_a_dry_run_and_a_start_list_all_problems_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], dry_run: list[str]
) -> None:
    """Exit code 2, for a missing file and for a feedback function that cannot be used alike."""
    file = tmp_path / "policy.yaml"
    source = "feedback: {source: 'json:JSONDecoder'}"
    file.write_text(f"model: {{policy: ./no-model}}\ndata: {{path: no.jsonl}}\n{source}\nrun: {{root: {tmp_path}}}\n")
    assert main(PolicyJob, never, argv=["--config", str(file), *dry_run], read="builtins:vars") == 2
    out, err = capfd.readouterr()
    assert ("run folder: " in out) == bool(dry_run)
    assert err.splitlines()[-4:] == [
        "python -m jobs.train_policy: 3 problems:",
        "- feedback.source=json:JSONDecoder cannot be called with (prompt_text, response_text) and perhaps payload= or "
        "messages= or data_file=, but is JSONDecoder(*, object_hook=None, parse_float=None, parse_int=None, "
        "parse_constant=None, strict=True, "
        "object_pairs_hook=None): too many positional arguments",
        "- model.policy=./no-model: there is no folder of that name",
        "- data.path=no.jsonl: there is no such file",
    ]


def test_what_a_job_made_is_its_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.html").touch()
    print_outputs(report=tmp_path / "report.html", policy=tmp_path / "policy", folder=tmp_path)
    print_outputs(policy=tmp_path / "policy")
    assert capsys.readouterr().out == f"made: report {tmp_path / 'report.html'}, folder {tmp_path}\nmade: nothing\n"


def test_a_job_gets_what_was_read_and_its_run_folder_the_lines_of_progress(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": 1}\n')
    file = tmp_path / "evaluate.yaml"
    file.write_text(f"run: {{root: {tmp_path}}}\ndata: {{path: {data}}}\nfeedback: {{reward_model: '${{made}}'}}\n")
    seen: list[object] = []

    def run(job: EvaluateJob, read: object) -> None:
        seen.append(read)
        assert not job.run.folder.exists(), "it may be another process's"
        with sole_process(job.run.folder), log_duration("some work"):
            pass

    assert main(EvaluateJob, run, argv=["--config", str(file)], read="builtins:type") == 0
    assert seen == [EvaluateJob]
    lines = (tmp_path / "run" / "progress.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["some work ...", "some work: 0 s"]


@pytest.mark.parametrize("what", ["link", "folder"])
def test_a_lock_that_is_no_file_of_ours_is_not_followed(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "lock").symlink_to(victim) if what == "link" else (tmp_path / "lock").mkdir()
    file = tmp_path / "demo.yaml"
    file.write_text("run: {name: own}\n")

    def run(_job: DemoJob) -> None:
        with sole_process(tmp_path):
            pass

    assert main(DemoJob, run, argv=["--config", str(file)]) == 2
    error_output = capsys.readouterr().err
    assert f"{tmp_path / 'lock'}: " in error_output
    assert f"remove the {what} in its place" in error_output
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_mount_without_locks_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    reason = re.escape(os.strerror(number))
    advice = r"mount the file system with lock support, or set another run\.root"
    sentence = rf"^{tmp_path} cannot be locked \({reason}\): {advice}$"
    with pytest.raises(UserError, match=sentence), sole_process(tmp_path):
        pass


BEGIN = """
from jobs.common.cli import main
from jobs.common.run_folder import sole_process
from t2g.config import DemoJob

def run(config):
    with sole_process(config.run.folder):
        pass

raise SystemExit(main(DemoJob, run))
"""


def test_a_run_root_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """On a file system of its own that is read-only."""
    (tmp_path / "disk").mkdir()
    file = tmp_path / "demo.yaml"
    file.write_text(f"run: {{root: {tmp_path / 'disk'}}}\n")
    commands = f"mount -t tmpfs -o ro none {tmp_path / 'disk'} && {sys.executable} -c '{BEGIN}' --config {file}"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", commands],
        capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system of one's own on this machine: {done.stderr.strip()}")
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith(f"python -m jobs.demo: {tmp_path / 'disk'}")) == (2, True)
    assert "Read-only file system: make it writable" in line


def failing(error: BaseException) -> Callable[[DemoJob], int]:
    def run(_config: DemoJob) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("data.path: no such file"), 2, "data.path: no such file"),
        (UserError("field \x1b[2J"), 2, "field ␛[2J"),
        (RemoteUserError(UserError("model.policy: no folder")), 2, "model.policy: no folder"),
        (RunStopped("step 3: NaN in the loss"), 3, "step 3: NaN in the loss"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_expected_end_is_one_sentence_and_a_code(
    config: str, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, sentence: str
) -> None:
    assert main(DemoJob, failing(error), words, ["--config", config]) == code
    assert capsys.readouterr() == ("", f"python -m jobs.demo: {sentence}\n")


def test_an_internal_config_fails_with_the_same_message(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DemoJob, lambda job: bool(RunConfig(seed=-1)), words, ["--config", config]) == 2
    assert "seed: got -1, needs greater than or equal to 0" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(config: str) -> None:
    with pytest.raises(ZeroDivisionError):
        main(DemoJob, lambda job: 1 // 0, words, ["--config", config])


def test_a_wrong_config_is_refused_before_the_job_runs(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DemoJob, never, words, ["--config", config, "num_step=3"]) == 2
    assert "command line: num_step is unknown; did you mean num_steps?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--config"], ["--config", "x.yaml", "--dry"], ["--nonsense"]])
def test_wrong_options_are_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(DemoJob, never, words, argv)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seed", "3"], "--seed is no option: write run.seed=3"),
        (["--lr", "1e-5"], "--lr is no option: write learner.policy.lr=1e-5 or learner.critic.lr=1e-5"),
        (["--learning-rate=1e-5"], "--learning-rate is no option: write learner.policy.lr=1e-5 or "),
        (["--rollout.temperature", ".6"], "--rollout.temperature is no option: write rollout.temperature=.6"),
        (["--num-steps=9"], "--num-steps is no option: write num_steps=9"),
        (["--smoke"], "--smoke is no option: write run.smoke=true"),
        (["--model", "my model"], "--model is no option: write 'model.policy=my model'"),
        (["--temprature", "1"], "--temprature is no option: write rollout.temperature=1"),
        (
            ["--name", "a", "--seed", "3"],
            "--name is no option: write run.name=a\n--seed is no option: write run.seed=3",
        ),
        (["--seed", "num_steps=3"], "--seed is no option: write run.seed=VALUE"),
        (["--zzzzz", "3"], "--zzzzz is no option: settings are written as key=value, and --help lists the keys"),
    ],
)
def test_an_option_that_is_none_is_answered_with_its_key(
    config: str, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(PolicyJob, never, argv=["--config", config, *options])
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "split", [["learner.lora={r:", "16}"], ["run.name=my", "run"], ["data.columns={prompt:", "q}"]]
)
def test_a_key_that_the_shell_split_is_answered_with_quotes(
    config: str, capsys: pytest.CaptureFixture[str], split: list[str]
) -> None:
    assert main(PolicyJob, never, argv=["--config", config, *split]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "put the whole key=value in quotes" in line


def test_a_job_with_a_default_file_needs_no_config(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DemoJob, never, words, argv=["--dry-run"], default_file=Path(config)) == 0
    assert "7 steps in words" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(DemoJob, never, words, argv=["--dry-run"])
    assert caught.value.code == 2
    assert "--config" in capsys.readouterr().err


def test_help_lists_every_section_with_the_defaults_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(PolicyJob, lambda job: 0, lambda job: "", ["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "PydanticUndefined" not in text and "FieldInfo" not in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["learner.policy.lr"][1] == "1e-06"
    assert rows["learner.critic.lr"][1] == "1e-05"  # the learner's default, not the section's
    assert rows["model.policy"][1] == "required"
    assert rows["num_steps"][1] == "100"
    assert rows["learner.critic_ranks.threads"][1] == "1"  # a default that follows another key
    sections = {line.partition(": ")[0]: line for line in text.splitlines() if line[:1] not in ("", " ")}
    assert {"run", "rollout", "learner.policy", "learner.lora"} <= sections.keys(), "each says what it is for"
    assert sections["learner.critic_ranks"].endswith("(off by default)")


def test_help_loads_no_large_package() -> None:
    """Each of these takes seconds to load."""
    code = """
import sys
from jobs.common.cli import main
from t2g.config import PolicyJob
try:
    main(PolicyJob, None, None, ["--help"])
finally:
    print(sorted({"torch", "ray", "vllm", "transformers", "deepspeed", "datasets", "pandas"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "learner.policy.lr" in done.stdout


def child(code: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


LOOP = """
import signal, time
from jobs.common.cli import install_stop_flag
stop = install_stop_flag()
assert not stop
print("ready", flush=True)
deadline = time.monotonic() + 30
while not stop and time.monotonic() < deadline: time.sleep(.01)
print(stop.signal_name, flush=True)
"""


@pytest.mark.parametrize(("name", "saves_work"), [("SIGTERM", True), ("SIGINT", True), ("SIGINT", False)])
def test_a_signal_only_sets_the_flag(name: str, saves_work: bool) -> None:
    process = child(LOOP.replace("install_stop_flag()", f"install_stop_flag(saves_work={saves_work})"))
    process.send_signal(signal.Signals[name])
    assert process.stderr is not None and process.stderr.readline() == "\n"
    answer = process.stderr.readline()  # at once, before the job ends
    assert answer.startswith(f"{name}: ")
    second = "after a second Ctrl-C it waits only for a learner call or a write that is running"
    assert (second in answer) == (name == "SIGINT")
    assert ("is saved" in answer) == saves_work
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == (f"{name}\n", 0)


def test_a_second_interrupt_stops_at_once() -> None:
    process = child(LOOP + "time.sleep(30)\n")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGINT\n"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert time.monotonic() - started < 20


def test_the_flag_is_the_handler_that_stands() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        flag = install_stop_flag()
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag
        assert flag.signal_name == "SIGTERM"
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "/venv/bin/t2g", "train", "--config", "a.yaml"], "t2g train"),
        (["python", "-m", "jobs.train_policy", "--config", "a.yaml"], "python -m jobs.train_policy"),
        (["python"], "python -m jobs.train_policy"),
    ],
)
def test_messages_begin_with_the_command_that_was_typed(
    command: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", command)
    assert program_name("jobs.train_policy") == name


def test_the_same_command_goes_on_from_the_mirror(config: str, tmp_path: Path) -> None:
    """The job finds its folder restored, and its last files are copied when it ends by an error as well."""
    arguments = ["--config", config, "run.name=own", f"run.mirror=file://{tmp_path}/mirror/"]
    file = tmp_path / "own" / "progress.txt"

    def run(_config: DemoJob) -> int:
        lines = file.read_text() if file.exists() else ""
        file.write_text(f"{lines}start\n")
        if len(lines) < 10:
            raise RunStopped("not done")
        return 7

    assert main(DemoJob, run, words, arguments) == 3
    assert main(DemoJob, run, words, [*arguments, "--dry-run"]) == 0
    shutil.rmtree(tmp_path / "own")
    assert main(DemoJob, run, words, arguments) == 3
    shutil.rmtree(tmp_path / "own")
    assert main(DemoJob, run, words, arguments) == 7
    assert file.read_text() == "start\n" * 3
    assert main(DemoJob, never, words, [*arguments, "run.resume=never"]) == 2
    assert main(DemoJob, lambda job: 0, words, [*arguments, "run.smoke=true", "run.resume=never"]) == 0


@pytest.mark.parametrize(
    ("mirror", "message"),
    [
        ("/mnt/runs", "run.mirror"),
        ("s3://me:password123@bucket/runs", "run.mirror holds a key or a password"),
        ("s3://bucket/runs?key=password123", "run.mirror holds a key or a password"),
        ("nix://bucket/runs", "run.mirror=nix://bucket/runs: Protocol not known: nix"),
    ],
)
def test_a_mirror_that_cannot_be_used_is_refused(
    config: str, mirror: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(DemoJob, never, words, ["--config", config, f"run.mirror={mirror}"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "password123" not in err
