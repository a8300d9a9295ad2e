"""Jobs called from Python: in a notebook's event loop, in another thread, with functions and records of the program."""

import asyncio
import json
import os
import runpy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from models import random_model
from own_runs import read_example

from jobs import api as jobs_api
from jobs.annotate.annotation_job import READ_SAMPLES, complete_annotation
from jobs.api import PolicyRun, annotate, evaluate, job_start, train
from jobs.api.job_start import start
from jobs.common import cli
from jobs.common.cli import StopFlag, install_stop_flag
from jobs.common.run_folder import begin_folder
from t2g.config import AnnotateJob, ModelConfig, PolicyJob, loading
from t2g.config.python_functions import forget_functions, import_object
from t2g.errors import RunStopped, Stopped, UserError
from t2g.runs.identity import Identity

ROOT = Path(__file__).parents[2]
PROMPTS = [{"prompt": f"Say {word}.", "response": f"I say {word}.", "note": word} for word in ("a", "b", "c", "d")]
Judge = Callable[..., Any]


def make_judge(word: str, seen: list[str]) -> Judge:
    async def judge(prompt: str, response: str) -> Any:
        await asyncio.sleep(0)
        seen.append(prompt)
        return f"It says {word}.", [word] if word in response else [], ["I"]

    return judge


def make_strict_judge(seen: list[str]) -> Judge:
    async def judge(prompt: str, response: str) -> Any:
        seen.append(prompt)
        return "No.", [], ["I"]

    return judge


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {"run": {"root": tmp_path, "name": "r"}, "annotate": {"heldout_share": 0.4}}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """No call leaves a signal handler or a function behind. Commands of other tests leave their handler of SIGINT."""
    left = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    signal.signal(signal.SIGINT, left)
    forget_functions()


def in_notebook(call: Callable[[], Any]) -> Any:
    """Call it as a cell does: in a function that the running event loop of this thread has called."""

    async def cell() -> Any:
        return call()

    return asyncio.run(cell())


def in_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join(60)
    return results[0]


@pytest.mark.parametrize("where", [in_notebook, in_thread, lambda call: in_thread(lambda: in_notebook(call))])
def test_records_and_a_function_of_the_program_are_annotated(config: dict[str, Any], where: Any) -> None:
    seen: list[str] = []
    records = where(lambda: annotate(config, prompts=PROMPTS, feedback=make_judge("a", seen)))
    assert [(r["response"], r["critique"], r["payload"]["note"]) for r in records] == [
        (row["response"], "It says a.", row["note"]) for row in PROMPTS
    ]
    expected = [[(6, 1), (0, -1)], [(3, 1), (0, -1)]]
    for record, spans in zip(records[:2], expected, strict=True):
        assert [(span["start"], span["label"]) for span in record["spans"]] == spans
    folder = config["run"]["root"] / "r"
    file_lines = [(folder / name).read_text().splitlines() for name in ("train.jsonl", "heldout.jsonl")]
    assert all(file_lines)
    assert len(file_lines[0] + file_lines[1]) == len(seen) == len(PROMPTS)
    assert records[0]["version"] == "__main__:judge"


def test_the_same_call_goes_on_and_another_function_is_refused(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    records = annotate(config, prompts=PROMPTS, feedback=make_judge("a", seen))
    again = annotate(config, prompts=iter(PROMPTS), feedback=make_judge("a", seen))
    assert again == records and len(seen) == len(PROMPTS)
    with pytest.raises(UserError, match=r"other inputs: the content of annotate\.source \(hash \w+ -> \w+\); .*accept"):
        annotate(config, prompts=PROMPTS, feedback=make_strict_judge(seen))
    fewer = annotate(config, prompts=PROMPTS[:3], feedback=make_judge("a", seen))
    assert len(fewer) == 3, "annotation compares the data record by record"
    assert len(seen) == len(PROMPTS), "annotation compares the data record by record"
    annotate(config, prompts=PROMPTS, feedback=make_judge("a", seen))
    forget_functions()  # as in another process
    file = config["run"]["root"] / "r" / "config.yaml"
    capsys.readouterr()
    assert cli.main(AnnotateJob, complete_annotation, argv=["--config", str(file)], read=READ_SAMPLES) == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("reading the data")]
    assert "annotate.source=__main__:judge" in sentence and "start that program again" in sentence


def test_records_that_people_judged_are_their_own_feedback(config: dict[str, Any]) -> None:
    """`annotate.human_file` follows `data.path`, which is the file that the call has written."""
    rows = [{**row, "critique": "Too long.", "poor": [row["response"][:2]]} for row in PROMPTS]
    records = annotate(config | {"annotate": {"heldout_share": 0.4, "source": "human"}}, prompts=rows)
    assert [record["critique"] for record in records] == ["Too long."] * len(PROMPTS)
    assert all(record["spans"][0]["label"] == -1 for record in records)


def test_a_dataset_is_read_as_a_list(config: dict[str, Any], tmp_path: Path) -> None:
    from datasets import Dataset

    source = annotate(config, prompts=Dataset.from_list(PROMPTS), feedback=make_judge("a", []))
    assert [record["payload"]["note"] for record in source] == ["a", "b", "c", "d"]
    with pytest.raises(UserError, match=r"^prompts: record 2 holds bytes, which no journal can keep$"):
        annotate(config, prompts=[PROMPTS[0], {"prompt": b"x"}])
    with pytest.raises(UserError, match=r"records-\w+\.jsonl:1: holds \"Say a\.\"; it needs to be an object"):
        annotate(config, prompts=["Say a."], feedback=make_judge("a", []))  # type: ignore[list-item]


@pytest.mark.parametrize("file", ["configs/own/policy.yaml", "configs/tiny/policy.yaml", "configs/smol/policy.yaml"])
def test_a_config_is_an_object_a_dict_or_a_file(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = loading.load(PolicyJob, ROOT / file, environ={}, find_resources=cli.find_resources)
    forms = [config, loading.read_yaml(ROOT / file)[0], ROOT / file, file]
    loaded = [job_start._load(PolicyJob, form, {}, []) for form in forms]
    assert all(each == config for each in loaded)
    assert len({each.model_dump_json() for each in loaded}) == 1


def test_a_function_stands_wherever_a_config_takes_an_import_path(tmp_path: Path) -> None:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    sources = {"own": {"source": make_judge("a", [])}, "other": {"source": json.dumps}}
    values = {
        "run": {"root": tmp_path},
        "model": ModelConfig(policy=str(tmp_path), system_prompt="Be short."),
        "data": {"path": tmp_path / "d.jsonl"},
        "num_steps": 7,
        "objective": {"outcome_rewards": [{"source": reward, "weight": 0.5}]},
        "feedback": {"sources": sources},
    }
    loaded = job_start._load(PolicyJob, values, {}, [])
    assert loaded.feedback.sources is not None and loaded.model.system_prompt == "Be short."
    assert {name: source.source for name, source in loaded.feedback.sources.items()} == {
        "own": "__main__:judge", "other": "json:dumps",
    }  # fmt: skip
    (paid,) = loaded.objective.outcome_rewards
    assert paid.source == "__main__:reward" and import_object(paid.source) is reward
    contents = Identity.from_config(loaded).contents
    assert {"feedback.sources.own.source", "objective.outcome_rewards.__main__:reward"} < contents.keys()
    assert (loaded.data.path, loaded.num_steps) == (str(tmp_path / "d.jsonl"), 7)
    with pytest.raises(UserError, match=r"^config: nmu_steps is unknown; did you mean num_steps"):
        job_start._load(PolicyJob, values | {"nmu_steps": 7}, {}, [])
    with pytest.raises(UserError, match=r"^config: run.name holds a line break"):
        job_start._load(PolicyJob, values | {"run": {"name": "a\nb"}}, {}, [])


def test_what_would_stop_a_job_is_raised_at_once(config: dict[str, Any], tmp_path: Path) -> None:
    values = {"run": config["run"], "model": {"policy": tmp_path / "none"}}
    with pytest.raises(UserError) as caught:
        train(values, prompts=[{"text": "a"}], feedback=lambda prompt: None)
    problems = str(caught.value).splitlines()
    assert problems[0] == "3 problems:" and "no folder of that name" in str(caught.value)
    assert not (tmp_path / "r" / "config.yaml").exists()
    for bad in (5, object(), "judge"):
        with pytest.raises(UserError, match=r"^feedback=, prompts=: annotate\b") as caught:
            annotate(config, prompts=PROMPTS, feedback=bad)
        assert "command line" not in str(caught.value)
    assert not [*tmp_path.rglob("records-*")], "a refused call left its records"
    with pytest.raises(UserError, match=r"^what='rewards' is none of reward, policy, teacher$"):
        evaluate(values, what="rewards")


def fake_start(config: dict[str, Any], job: Callable[..., Any]) -> Any:
    values = config | {"data": {"path": ROOT / "jobs" / "starter" / "prompts.jsonl"}}
    return start(AnnotateJob, job, "builtins:type", values, {"annotate.source": make_judge("a", [])})


def test_one_job_of_a_process_runs_at_a_time(config: dict[str, Any]) -> None:
    def job(job: AnnotateJob, read: Any) -> str:
        with pytest.raises(UserError, match=r"^a job of this Python process is still running"):
            fake_start(config, job)
        return "done"

    assert [fake_start(config, job), in_notebook(lambda: fake_start(config, job))] == ["done", "done"]


def test_other_prompts_do_not_replace_those_of_a_run(tmp_path: Path) -> None:
    random_model(tmp_path / "model")
    base_values = {"run": {"root": tmp_path, "smoke": False}, "model": {"policy": tmp_path / "model"}}

    def begin(rows: list[dict[str, str]], **run: Any) -> Path:
        def job(job: PolicyJob, read: Any) -> Path:
            begin_folder(job)
            return Path(job.data.path)

        values = base_values | {"run": base_values["run"] | run}
        inputs = {"data.path": rows, "feedback.source": make_judge("a", [])}
        return start(PolicyJob, job, "builtins:type", values, inputs)

    file = begin(PROMPTS)
    assert [json.loads(line) for line in file.read_text().splitlines()] == PROMPTS
    with pytest.raises(UserError, match=r"other inputs: the content of data\.path"):
        begin(PROMPTS[:3])
    assert begin(PROMPTS) == begin(PROMPTS, smoke=True) == file
    assert [*tmp_path.rglob("records-*")] == [file], "those that were refused are gone"


def test_the_example_of_the_guide_is_a_job_of_three_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/integration/test_python_run.py runs it to its end."""
    jobs: list[PolicyJob] = []

    def begin(config: dict[str, Any], *, prompts: list[dict[str, Any]], feedback: Judge) -> PolicyRun:
        def job(job: PolicyJob, read: Any) -> PolicyRun:
            jobs.append(job)
            return PolicyRun(folder=job.run.folder)

        inputs = {"data.path": prompts, "feedback.source": feedback}
        return start(PolicyJob, job, "builtins:type", config, inputs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs_api, "train", begin)
    example = read_example(random_model(tmp_path / "model"))
    assert len([line for line in example.splitlines()[1:] if line]) <= 10
    (tmp_path / "first_run.py").write_text(example)
    runpy.run_path("first_run.py", run_name="__main__")
    (job,) = jobs
    assert (job.num_steps, job.rollout.prompts_per_step) == (3, 4)
    assert len(Path(job.data.path).read_text().splitlines()) == 4
    assert job.feedback.source == "__main__:judge"


def test_an_error_of_a_worker_is_raised_without_its_traceback(config: dict[str, Any]) -> None:
    class Remote(RunStopped):
        cause = RunStopped("the loss is NaN")

    def job(job: AnnotateJob, read: Any) -> None:
        raise Remote("ray::Worker.start()\n  File ...\n")

    for where in (in_notebook, lambda call: call()):
        with pytest.raises(RunStopped, match=r"^the loss is NaN$"):
            where(lambda: fake_start(config, job))


@pytest.mark.parametrize(("where", "number"), [
    (in_notebook, signal.SIGINT), (lambda call: call(), signal.SIGINT), (lambda call: call(), signal.SIGTERM),
])  # fmt: skip
def test_a_signal_ends_the_run_at_its_next_checkpoint(
    config: dict[str, Any], where: Any, number: signal.Signals
) -> None:
    flags: list[StopFlag] = []

    def job(job: AnnotateJob, read: Any) -> None:
        stop = install_stop_flag()
        deadline = time.monotonic() + 30
        flags.append(stop)
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        while not stop:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise Stopped

    with pytest.raises(Stopped):
        where(lambda: fake_start(config, job))
    assert [flag.signal_name for flag in flags] == [number.name]


class Terminated(Exception):
    pass


def terminate(number: int, frame: Any) -> None:
    raise Terminated


@pytest.mark.parametrize(("where", "number", "error"), [
    (in_notebook, signal.SIGINT, KeyboardInterrupt), (in_notebook, signal.SIGTERM, KeyboardInterrupt),
    (lambda call: call(), signal.SIGINT, KeyboardInterrupt), (lambda call: call(), signal.SIGTERM, Terminated),
])  # fmt: skip
def test_a_signal_ends_a_job_without_checkpoints(
    config: dict[str, Any], where: Any, number: signal.Signals, error: type[BaseException]
) -> None:
    ended: list[float] = []

    def job(job: AnnotateJob, read: Any) -> None:
        began = time.monotonic()
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        try:
            while time.monotonic() < began + 30:
                time.sleep(0.01)
        finally:
            ended.append(time.monotonic() - began)

    before = signal.signal(signal.SIGTERM, terminate)  # of the program; the default one ends the process
    try:
        with pytest.raises(error):
            where(lambda: fake_start(config, job))
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended and ended[0] < 10, "the call returned before its job, or after all of it"
    assert fake_start(config, lambda job, read: "next") == "next"


def test_a_run_gives_its_files(tmp_path: Path) -> None:
    policy_run = PolicyRun(folder=tmp_path)
    assert (policy_run.metrics, policy_run.samples) == ([], [])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "samples": 8}\n{"step": 2, "sam')
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "response": "a"}\n')
    assert (policy_run.metrics, policy_run.samples) == ([{"step": 1, "samples": 8}], [{"step": 1, "response": "a"}])
    assert (policy_run.policy.name, policy_run.report.name) == ("policy", "report.html")


def test_a_connected_ray_is_left_alone(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("the notebook's Ray was disconnected"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    random_model(tmp_path / "model")
    values = {"run": config["run"], "model": {"policy": tmp_path / "model"}, "rollout": {"max_model_len": 256}}
    with pytest.raises(UserError, match=r"^Ray is connected in this Python process, .*ray\.shutdown"):
        train(values, prompts=[{"prompt": "a"}], feedback=make_judge("a", []))
