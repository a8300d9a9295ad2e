"""One broken example of each thing that stops a job, on a model of random weights; and of what a machine lacks."""

import json
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from httpx import Request, Response
from huggingface_hub.errors import RepositoryNotFoundError
from models import random_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from jobs.train_policy.policy_data import read_data
from t2g.config import AnnotateJob, PolicyEvaluationJob, PolicyJob, RewardJob, ScoreJob
from t2g.errors import UserError
from t2g.resources import packages
from t2g.resources.preflight import Findings, emulated_dtypes, preflight, read_inputs

GIB = 2**30
ROOMY = {"CPU": 8, "GPU": 0, "memory": 64 * GIB}
FUNCTIONS = """
def judge(prompt, response): return "", [], []
def with_payload(prompt, response, payload): return "", [], []
def of_one(response): return "", [], []
def of_three(prompt, response, style): return "", [], []
async def asynchronous(prompt, response): return "", [], []
class Caller:
    async def __call__(self, prompt, response): return "", [], []
caller = Caller()
table = {}
def pays(completions): return [1.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_the_models_name(tmp_path: Path, data: str, value: float) -> None:
    folder = random_model(tmp_path / "broken")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[[0, 2]] = value
    save_file(tensors, file, metadata={"format": "pt"})
    (sentence,) = preflight(policy(folder, data, feedback=function("judge")), ROOMY).wrong
    count = tensors[name].numel()
    assert sentence.startswith(f"model.policy={folder}: model.safetensors has 2 of {count:,} weights that are NaN or")
    assert name in sentence
    file.write_bytes(file.read_bytes()[:100])
    (sentence,) = preflight(policy(folder, data, feedback=function("judge")), ROOMY).wrong
    assert sentence.startswith(f"model.policy={folder}: model.safetensors has no readable weights (")


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "preflight_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # a user's own files may lie in the repository's folder
    yield
    sys.modules.pop("preflight_functions", None)


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "Why?"}) + "\n")
    return str(path)


def policy(model: Path | str, data: str, /, **sections: Any) -> PolicyJob:
    defaults = {"model": {"policy": str(model)}, "data": {"path": data}, "feedback": function("judge")}
    return PolicyJob.model_validate(defaults | sections)


def function(name: str) -> dict[str, str]:
    return {"source": f"preflight_functions:{name}"}


def all_of(findings: Findings) -> list[str]:
    return [*findings.wrong, *findings.missing]


def test_a_run_that_can_start(model: Path, data: str) -> None:
    for name in ("judge", "with_payload", "asynchronous", "caller"):
        assert all_of(preflight(policy(model, data, feedback=function(name)), ROOMY)) == []


def test_a_missing_scorer_is_a_finding_before_anything_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"policies": {"a": {"policy": "m"}}, "data": {"path": "d.jsonl"}, "bertscore": "encoder"}
    job = PolicyEvaluationJob.model_validate(values)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    (problem,) = packages.find_absent_scorer(job)
    assert "bertscore" in problem and "bert-score" in problem
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    assert packages.find_absent_scorer(job) == []


def test_a_first_row_may_lack_a_column(model: Path, data: str, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("q,ref\nWhy?,\nHow?,x\n")
    sections = {"data": {"path": str(table), "columns": {"prompt": "q", "reference": "ref"}}}
    assert all_of(preflight(policy(model, data, feedback=function("judge"), **sections), ROOMY)) == []


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"feedback": function("of_one")},
            "preflight_functions:of_one cannot be called with (prompt_text, response_text)",
        ),
        ({"feedback": function("of_three")}, "but is of_three(prompt, response, style)"),
        ({"feedback": function("table")}, "has the type dict; it needs to be a function"),
        ({"feedback": function("nobody")}, "has no attribute 'nobody'"),
        ({"feedback": {"source": "program"}}, "task prompts has no program of its own"),
        ({"task": "summarisation"}, "and no import path pkg.mod:Class; did you mean summarization?"),
        ({"rollout": {"max_model_len": 4096}}, "rollout.max_model_len=4096, and "),
        ({"rollout": {"gpus": 3}}, "rollout.gpus=3"),
        ({"rollout": {"memory_gib": 1e-4}}, "rollout.memory_gib is 0.0001, and the weights of "),
        ({"learner": {"memory_gib": 1e-4}}, "learner.memory_gib is 0.0001: a rank that loads its models needs "),
        ({"objective": {"teacher": {}}}, "rollout.max_model_len and feedback.engine.max_model_len together=5120"),
    ],
)
def test_what_no_machine_can_run(model: Path, data: str, sections: dict[str, Any], words: str) -> None:
    findings = preflight(policy(model, data, **sections), None)
    assert len(findings.wrong) == 1, findings
    assert words in findings.wrong[0], findings
    assert findings.missing == [], findings
    with pytest.raises(UserError) as refused:
        findings.refuse()
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"feedback": {"source": "nowhere_at_all.feedback:judge"}}, "No module named 'nowhere_at_all'"),
        ({"task": "nowhere_at_all:Task"}, "No module named 'nowhere_at_all'"),
        ({"data": {"path": "my.jsonl"}}, "data.path=my.jsonl: there is no such file"),
        ({"eval_data": {"path": "/no/held.parquet"}}, "eval_data.path=/no/held.parquet: there is no such file"),
        ({"model": {"policy": "./my-modle"}}, "model.policy=./my-modle: there is no folder of that name"),
        ({"feedback": {"source": "human", "human_file": "h.csv"}}, "feedback.human_file=h.csv: there is no such file"),
        (
            {"feedback": {"source": "llm", "llm": {"url": "http://h/v1", "model": "m", "key_env": "T2G_NO_SUCH"}}},
            "llm.key_env names T2G_NO_SUCH, which is not set",
        ),
        ({"feedback": {"source": "reward_model", "reward_model": "/no/reward"}}, "feedback.reward_model=/no/reward"),
        pytest.param(
            {"log": {"trackers": ["tensorboard", "wandb"]}},
            "log.trackers has wandb, whose package is not installed: `uv pip install wandb`",
            marks=pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed"),
        ),
    ],
)
def test_what_is_not_on_this_machine(model: Path, data: str, sections: dict[str, Any], words: str) -> None:
    findings = preflight(policy(model, data, **sections), None)
    assert len(findings.missing) == 1, findings
    assert words in findings.missing[0], findings
    assert findings.wrong == [], findings


def test_bfloat16_is_emulated_on_a_cpu_without_its_instructions(model: Path, data: str) -> None:
    job = policy(model, data, rollout={"dtype": "bfloat16", "gpus": 1}, learner={"dtype": "bfloat16"})
    assert emulated_dtypes(job.roles(), {"avx2": True, "avx512_bf16": False, "amx_bf16": False}) == ["learner.dtype"]
    assert emulated_dtypes(job.roles(), {"avx512_bf16": False, "amx_bf16": True}) == []
    assert emulated_dtypes(policy(model, data).roles(), {}) == []


def test_a_reward_function_is_checked_even_where_the_model_is_missing(data: str) -> None:
    objective = {"outcome_rewards": [{"source": "preflight_functions:of_one"}, {"source": "preflight_functions:pays"}]}
    job = policy("./my-modle", data, objective=objective)
    findings = preflight(job, None)
    assert read_inputs(findings, job, read_data) is None
    (sentence,) = findings.wrong
    assert sentence.startswith("objective.outcome_rewards: preflight_functions:of_one cannot be called with prompts, ")


def test_an_unknown_name_is_requested_once(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def unreachable(self: object, name: str, **how: Any) -> None:
        requests.append((name, how["timeout"]))
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    (sentence,) = preflight(policy("somebody/elsewhere", data), None).missing
    assert "model.policy=somebody/elsewhere: there is no folder of that name, nor in the hub's cache" in sentence
    assert [name for name, timeout in requests if timeout <= 5] == ["somebody/elsewhere"]


USABLE = {"task", "model.policy", "data"}
ANSWER = Response(404, request=Request("GET", "http://hub"))


@pytest.mark.parametrize("error", [ConnectionError("no network"), RepositoryNotFoundError("404", response=ANSWER)])
def test_an_unknown_data_set_is_requested_once(
    model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = []

    def unknown(self: object, name: str, **how: Any) -> None:
        requests.append((name, how["revision"], how["timeout"]))
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unknown)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    mistyped = {"path": "openai/gsm8kk", "revision": "abc", "subset": "main"}
    findings = preflight(policy(model, "unused", data=mistyped), None)
    (sentence,) = findings.missing
    assert "data.path=openai/gsm8kk: there is no folder of that name" in sentence and findings.wrong == []
    assert requests == [("openai/gsm8kk", "abc", 5)]
    (tmp_path / "datasets--openai--gsm8kk").mkdir()  # fetched before
    assert preflight(policy(model, "unused", data=mistyped), None) == Findings(usable=USABLE)
    assert len(requests) == 1
    (sentence,) = preflight(policy(model, "unused", data={"path": "openai/gsm8k"}), None).wrong
    assert "set data.revision to a commit" in sentence
    (sentence,) = preflight(policy(model, "unused", data={"path": "./no/folder", "revision": "abc"}), None).missing
    assert sentence.endswith("there is no folder of that name")


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    job = policy(tmp_path / "no", "no.jsonl", feedback=function("of_one"), task="nothing")
    findings = preflight(job, {"CPU": 0.5, "GPU": 0, "memory": 64 * GIB})
    assert [words.partition(":")[0] for words in findings.missing] == [
        "this machine is too small", f"model.policy={tmp_path / 'no'}", "data.path=no.jsonl",
    ]  # fmt: skip
    assert len(findings.wrong) == 1, "a task that is unknown has no feedback function"


def test_a_module_that_ends_the_process_while_it_is_imported(model: Path, data: str, tmp_path: Path) -> None:
    (tmp_path / "ending_functions.py").write_text("raise SystemExit(0)")
    (sentence,) = preflight(policy(model, data, feedback={"source": "ending_functions:judge"}), None).wrong
    assert sentence == "feedback.source=ending_functions:judge cannot be imported: SystemExit: 0"


def write_records(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def lengths(job: PolicyJob) -> tuple[int, int]:
    data = read_data(job)
    return len(data.prompts), len(data.eval_prompts)


def test_all_records_are_read_before_a_start(model: Path, data: str, tmp_path: Path) -> None:
    many = write_records(tmp_path / "many.jsonl", *({"prompt": f"Why {i}?"} for i in range(20)))
    job = policy(model, many, eval_data={"path": data})
    findings = preflight(job, ROOMY)
    assert read_inputs(findings, job, lengths) == (20, 1)
    assert all_of(findings) == []
    wrong = ({"prompt": "Why?"}, {"text": "b"}, {"prompt": "Who?"}, *[{"prompt": 4}] * 3)
    job = policy(model, many, eval_data={"path": write_records(tmp_path / "wrong.jsonl", *wrong)})
    findings = preflight(job, ROOMY)
    assert read_inputs(findings, job, lengths) is None
    first, *_, last = findings.wrong
    assert first.startswith("eval_data record 2 (wrong.jsonl:2): ")
    assert last == "1 more records are wrong"
    assert len(findings.wrong) == 4


def test_wrong_records_are_reported_with_a_missing_model_and_a_function_of_another_signature(tmp_path: Path) -> None:
    path = write_records(tmp_path / "wrong.jsonl", {"prompt": "Why?"}, {"text": "b"})
    job = policy("/no/model", path, feedback=function("of_three"))
    findings = preflight(job, ROOMY)
    assert read_inputs(findings, job, lengths) is None
    assert findings.missing == ["model.policy=/no/model: there is no folder of that name"]
    signature, record = findings.wrong
    assert "of_three(prompt, response, style)" in signature and record.startswith("data record 2 (wrong.jsonl:2): ")
    with pytest.raises(UserError, match=r"^3 problems:\n- feedback.source=.*\n- data record 2 .*\n- model.policy="):
        findings.refuse()


def test_nothing_is_read_that_is_yet_to_be_made(data: str) -> None:
    job = policy("${artifacts}/base/model", data)
    findings = preflight(job, ROOMY)
    assert read_inputs(findings, job, lengths) is None
    assert all_of(findings) == []


def test_heads_of_a_size_that_the_cpu_kernels_lack(model: Path, data: str, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 48}))
    (words,) = preflight(policy(tmp_path, data), None).wrong
    assert "head size 48" in words
    assert all_of(preflight(policy(tmp_path, data, rollout={"gpus": 1}, learner={"gpus": 1}), None)) == []


def test_only_a_trained_policy_needs_the_names_of_the_text_model(model: Path, data: str, tmp_path: Path) -> None:
    """Engines serve a vision checkpoint as it is."""
    shutil.copytree(model, folder := tmp_path / "vision")
    config = AutoConfig.for_model("qwen3_5", text_config=json.loads((model / "config.json").read_text()))
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.save_pretrained(folder)
    (sentence, *_) = preflight(policy(folder, data), ROOMY).wrong
    assert f"model.policy={folder}" in sentence and "Qwen3_5ForCausalLM" in sentence
    evaluated = {"policies": {"plain": {"policy": str(folder)}}, "data": {"path": data}}
    assert not any("Qwen3_5ForCausalLM" in text for text in preflight(PolicyEvaluationJob(**evaluated), ROOMY).wrong)


def test_a_folder_without_a_model_and_a_tokenizer_without_a_template(model: Path, data: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    bare = tmp_path / "bare"
    empty.mkdir(), bare.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    (words,) = preflight(policy(empty, data), None).wrong
    assert "this folder holds no model" in words
    (words,) = preflight(policy(bare, data), None).wrong
    assert "has no chat template" in words


def test_other_jobs_name_other_models(model: Path, data: str) -> None:
    at = {"data": {"path": data}}
    none = {"policy": "/no/model"}
    reward = {"feedback": {"reward_model": "/no/model"}}
    jobs = {
        "policies.span.policy": PolicyEvaluationJob.model_validate({**at, "policies": {"span": none}}),
        "annotate.reward_model": AnnotateJob.model_validate(
            {**at, "annotate": {"source": "reward_model", "reward_model": "/no/model"}}
        ),
        "model.policy": RewardJob.model_validate({**at, "model": none, "eval_data": {"path": data}}),
        "feedback.reward_model": ScoreJob.model_validate(reward),
    }
    for key, job in jobs.items():
        assert preflight(job, None).missing == [f"{key}=/no/model: there is no folder of that name"]
    annotate_job = AnnotateJob.model_validate(
        {**at, "model": none, "annotate": {"source": "preflight_functions:of_one"}}
    )
    assert "of_one" in preflight(annotate_job, None).wrong[0]


def test_what_is_yet_to_be_made_is_passed_over() -> None:
    job = policy("${artifacts}/base/model", "${artifacts}/train.jsonl")
    assert all_of(preflight(job, ROOMY)) == []
