import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import letter_tokenizer
from synced_paths import record_syncs

from actors.learner.export import EXPORT_FILE
from actors.learner.zero3 import lr_factor
from jobs.common import fleets
from jobs.demo.__main__ import method_job
from jobs.demo.__main__ import run as run_demo
from jobs.train_policy import prepared
from jobs.train_policy.policy_data import drop_failing_references, read_data, warn_of_optional_criteria
from jobs.train_policy.policy_job import format_smoke_summary, show_last_response
from jobs.train_policy.policy_job import run_training as run
from jobs.train_policy.policy_results import write_summary
from jobs.train_policy.policy_training import make_learner_spec
from t2g.config import DemoJob, PolicyJob, loading, with_overrides
from t2g.errors import Stopped, UserError
from t2g.runs import identity
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity
from t2g.tasks.code import CodeTask

NEUTRAL = "tokens/neutral_share"
LINES = [
    {"step": 0, "samples": 0, "time/eval_s": 4.0, "eval/fact_f1": 0.25},
    {"step": 1, "samples": 8, "time/step_s": 2.0, NEUTRAL: 1.0},
    {"step": 2, "samples": 16, "time/step_s": 6.0, "time/eval_s": 6.0, NEUTRAL: 1.0, "eval/fact_f1": 0.5},
]


def summary_of(folder: Path, lines: list[dict[str, float]]) -> tuple[PolicyJob, dict]:
    job = PolicyJob.model_validate(
        {
            "run": {"name": "own", "root": str(folder)}, "model": {"policy": "m"}, "task": "summarization",
            "data": {"path": "d.jsonl"}, "feedback": {"source": "my_pkg.feedback:judge"}, "num_steps": 10,
            "eval": {"every": 5},
        }
    )  # fmt: skip
    job.run.folder.mkdir()
    (job.run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return job, write_summary(job, seconds=30.0)


def test_a_smoke_run_says_what_the_whole_run_takes(tmp_path: Path) -> None:
    job, summary = summary_of(tmp_path, [*LINES[:2], {**LINES[2], NEUTRAL: 0.75}])
    assert summary["timing"] == {"wall_s": 30.0, "steps_s": 8.0, "evaluations_s": 10.0}
    assert (summary["base"], summary["policy"]) == ({"fact_f1": 0.25}, {"fact_f1": 0.5})
    # 10 steps of 4 s, and evaluations of 5 s before the first and after steps 5 and 10
    assert format_smoke_summary(job, summary) == (
        "smoke run done: 2.0 samples/s, 4.0 s a step; 10 steps will take about 55 s"
    )
    often = job.model_copy(update={"eval": job.eval.model_copy(update={"every": 1})})  # 3 and 11 evaluations
    assert "will take about 1 min 17 s" in format_smoke_summary(often, summary)


def test_an_earlier_evaluation_is_not_that_of_the_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last = {name: value for name, value in LINES[2].items() if not name.startswith("eval/")}
    _, summary = summary_of(tmp_path, [*LINES[:2], last])
    assert (summary["base"], summary["policy"]) == ({"fact_f1": 0.25}, {})
    assert "step 2 has no evaluation" in caplog.text


def test_the_gap_of_the_export_stands_in_the_summary(tmp_path: Path) -> None:
    exported = {"probe_gap": {"largest": 2e-6, "p95": 1e-6, "median": 1e-7}, "probe_tokens": 64}
    job, summary = summary_of(tmp_path, LINES)
    assert "export" not in summary
    (job.run.folder / "policy").mkdir()
    (job.run.folder / "policy" / EXPORT_FILE).write_text(json.dumps(exported))
    write_summary(job, seconds=30.0)
    assert json.loads((job.run.folder / "summary.json").read_text())["export"] == exported


def test_the_policy_is_on_the_disk_before_the_summary_that_declares_the_run_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = summary_of(tmp_path, LINES)
    weights = job.run.folder / "policy" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_text("weights")
    synced = record_syncs(monkeypatch)
    write_summary(job, seconds=30.0)
    summary = next(number for number, path in enumerate(synced) if "summary.json" in path.name)
    assert {weights, weights.parent} <= {*synced[:summary]}


def test_a_smoke_run_of_a_function_that_quotes_nothing_says_so(tmp_path: Path) -> None:
    job, summary = summary_of(tmp_path, LINES)
    sentence = "neutral: feedback.source=my_pkg.feedback:judge gave no span with a reward"
    assert sentence in format_smoke_summary(job, summary)


def test_an_exported_policy_says_what_it_is(tmp_path: Path) -> None:
    job, _ = summary_of(tmp_path, LINES)
    (job.run.folder / "policy").mkdir()
    write_summary(job, seconds=30.0)
    card = (job.run.folder / "policy" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"base_model": "m", "library_name": "transformers", "tags": ["text2grad", "t2g"]}
    assert "| fact_f1 | 0.250 | 0.500 |" in card and "`d.jsonl`, seed 1" in card


def test_a_smoke_run_shows_one_response_with_its_spans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    span = {"start": 6, "end": 12, "label": -1, "severity": 1, "critique_range": [0, 4]}
    feedback = {"critique": "Bad.", "spans": [span], "status": "ok", "source": "program", "version": "v"}
    about = {"split": "train", "sample_index": 0, "prompt": "p", "finish_reason": "stop"}
    lines = [
        {"step": 3, "prompt_id": "mute", "response": "mute", "feedback": feedback | {"spans": []}},
        {"step": 2, "prompt_id": "told", "response": "about laptop", "feedback": feedback},
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(about | line) + "\n" for line in lines))
    show_last_response(tmp_path)
    out = capsys.readouterr().out
    assert "one response, of step 2:" in out and "about [-laptop-]" in out and "Bad." in out
    (tmp_path / "samples.jsonl").write_text("")
    show_last_response(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("source", ["reward_model", "program"])
def test_the_artifacts_have_a_reward_model_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    def make_demo_artifacts(demo: Any, fleets: Any, *, reward: bool) -> None:
        raise Stopped(f"reward={reward}")

    monkeypatch.setattr(prepared, "make_demo_artifacts", make_demo_artifacts)
    monkeypatch.setattr(prepared, "on_cluster", lambda job: nullcontext())
    tiny = Path(__file__).parents[2] / "configs" / "tiny" / "policy.yaml"
    with pytest.raises(Stopped, match=f"reward={source == 'reward_model'}"):
        run(loading.load(PolicyJob, tiny, [f"run.root={tmp_path}", f"feedback.source={source}"], environ={}), None)


def test_a_late_record_without_tests_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodeTask, "run", lambda *_: pytest.fail("a program was run"))
    letter_tokenizer(tmp_path)
    rows = [
        {"id": f"q{i}", "question": "Write f."} | ({"test": "def test_f(): ..."} if i < 8 else {}) for i in range(9)
    ]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = PolicyJob.model_validate(
        {
            "task": "code", "model": {"policy": str(tmp_path)}, "data": {"path": str(tmp_path / "data.jsonl")},
            "feedback": {"source": "program"}, "rollout": {"prompts_per_step": 2, "max_model_len": 1024},
        }
    )  # fmt: skip
    pays = with_overrides(job, {"objective.outcome_rewards": [{"source": "task"}]})
    assert len(read_data(job).prompts) == 9
    resamples = with_overrides(job, {"rollout.resample_zero_groups": 8})
    with pytest.raises(UserError, match=r"data.path has 9 prompts, .*resample_zero_groups=8 may take 10"):
        read_data(job, [job, resamples])
    for read in (lambda: read_data(pays), lambda: read_data(job, [job, pays])):  # of a method of a comparison as well
        with pytest.raises(
            UserError, match=r"outcome_rewards: source task pays passed, and 1 of 9 prompts .* the first is prompt q8; "
        ):
            read()


TINY = Path(__file__).parents[2] / "configs" / "tiny"


@pytest.mark.parametrize("methods", [["span"], ["span", "scalar"]])
def test_fewer_steps_than_are_done_leave_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, methods: list[str]
) -> None:
    def started(job: Any) -> None:
        raise Stopped

    monkeypatch.setattr(fleets, "on_cluster", started)
    monkeypatch.setattr(prepared, "on_cluster", started)
    steps = dict(zip(methods, (20, 30), strict=False))
    for method, step in steps.items():
        store = CheckpointStore(tmp_path / "demo" / "methods" / method / "checkpoints", keep=2)
        for saved_step in (10, step):
            store.write(saved_step, lambda folder: None, {"step": saved_step})

    def configs(num_steps: int, *overrides: str) -> list[Any]:
        all_overrides = [f"run.root={tmp_path}", f"num_steps={num_steps}", *overrides]
        if len(methods) == 1:
            name = ["run.root=" + str(tmp_path / "demo" / "methods"), "run.name=span"]
            return [loading.load(PolicyJob, TINY / "policy.yaml", [*all_overrides, *name], environ={})]
        demo = loading.load(DemoJob, TINY / "demo.yaml", [*all_overrides, "methods=[span,scalar]"], environ={})
        return [demo, *(method_job(demo, method) for method in demo.methods)]

    def start(num_steps: int, *overrides: str) -> None:
        config = configs(num_steps, *overrides)[0]
        run(config, None) if len(methods) == 1 else run_demo(config)

    for job in configs(40)[-len(methods) :]:
        identity.save_identity(job.run.folder, Identity.from_config(job))
        loading.write(job, job.run.folder)

    start(19)
    lines = capsys.readouterr().out.splitlines()
    messages = [
        (method, f"is already at step {step}: num_steps=19 leaves nothing to do") for method, step in steps.items()
    ]
    assert lines == [f"{tmp_path / 'demo' / 'methods' / method} {words}" for method, words in messages]
    for others in ([20], [19, "run.resume=never"], [19, "run.smoke=true"]) if len(methods) == 1 else ([20],):
        with pytest.raises(Stopped):
            start(*others)
    if len(methods) == 1:
        with pytest.raises(UserError, match=r"other inputs: rollout.temperature"):
            start(19, "rollout.temperature=0.5")
    newest = tmp_path / "demo" / "methods" / "span" / "checkpoints" / "step-00000020" / "state.json"
    newest.write_text("torn")
    with pytest.raises(Stopped):
        start(19)
    assert capsys.readouterr().out == "", "the last whole one is of step 10"


def test_the_schedule_spans_the_steps_that_it_is_given() -> None:
    job = loading.load(PolicyJob, TINY / "policy.yaml", environ={})
    longer = with_overrides(job, {"num_steps": 30})
    scheduled = with_overrides(longer, {"learner.schedule_steps": job.num_steps})
    assert [make_learner_spec(config).num_updates for config in (job, longer, scheduled)] == [10, 30, 10]
    num_kept = make_learner_spec(scheduled).num_updates
    longer_rates = [lr_factor(step, longer.learner.policy, 30) for step in range(30)]
    kept_rates = [lr_factor(step, scheduled.learner.policy, num_kept) for step in range(30)]
    whole = [lr_factor(step, job.learner.policy, 10) for step in range(10)]
    assert kept_rates[:10] == whole != longer_rates[:10]
    assert set(kept_rates[10:]) == {job.learner.policy.final_lr_ratio}


def test_training_on_an_optional_criterion_warns_without_one_scale(caplog: pytest.LogCaptureFixture) -> None:
    """A failed judgement counts as 0, more than an honest criticism."""
    style = {"source": "feedback:judge", "required": False}
    job = {"model": {"policy": "m"}, "data": {"path": "d"}, "feedback": {"sources": {"style": style}}}
    for objective in ({"normalize_criteria": True}, {"span_coef": 0, "local_coef": 0}):
        warn_of_optional_criteria(PolicyJob.model_validate(job | {"objective": objective}))
    assert caplog.text == ""
    warn_of_optional_criteria(PolicyJob.model_validate(job))
    assert "feedback.sources.style.required=false" in caplog.text


def test_references_that_fail_are_left_out_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    letter_tokenizer(tmp_path)
    head = "from unittest.mock import patch\nfrom solution import f\n"
    patched = f"{head}@patch('builtins.print')\ndef test(p):\n    f()\n    assert p.called\n"
    plain = f"{head}def test():\n    assert f() is None\n"
    rows = [
        {"id": name, "question": "Write f.", "test": tests, "solution": solution}
        for name, tests, solution in (
            ("plain", plain, "def f(): pass\n"), ("wrong", plain, "def f(): return 1\n"),
            ("patched", patched, "def f(): print('x')\n"),
        )
    ]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"path": str(tmp_path / "data.jsonl")}
    job = PolicyJob.model_validate(
        {
            "run": {"root": str(tmp_path)}, "task": "code", "model": {"policy": str(tmp_path)},
            "data": data, "eval_data": data,
            "feedback": {"source": "program"}, "rollout": {"prompts_per_step": 2, "max_model_len": 1024},
        }
    )  # fmt: skip
    unread = read_data(job)  # all that a dry run does
    assert [p.prompt_id for p in unread.prompts if "tests_mode" not in p.payload] == ["plain", "wrong", "patched"]
    read = drop_failing_references(job, unread)
    for prompts in (read.prompts, read.eval_prompts):
        assert [(p.prompt_id, p.payload["tests_mode"]) for p in prompts] == [
            ("plain", "separate"),
            ("patched", "together"),
        ]
    assert "data.path has only" not in caplog.text
    more = with_overrides(job, {"rollout.prompts_per_step": 4})
    assert len(read_data(more).prompts) == 3
    assert "data.path has only 3 prompts, and rollout.prompts_per_step=4: they get more samples" in caplog.text
