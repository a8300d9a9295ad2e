"""Reading configs: every problem is one sentence with its place, its key, what it got and what it needs."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import t2g
from configs import differing
from t2g.config import (
    AnnotateJob,
    CompareJob,
    DemoJob,
    LearnerConfig,
    PolicyJob,
    RewardEngineConfig,
    RolloutConfig,
    Section,
    SFTJob,
    loading,
    with_overrides,
)
from t2g.config.field_annotations import can_change_on_resume
from t2g.config.secrets import mask_secrets
from t2g.config.validation_errors import format_value
from t2g.errors import UserError

GOOD = """\
model: {policy: base}
data:
  path: prompts.jsonl
feedback:
  source: "my_feedback:judge"
rollout:
  temperature: 0.6
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "job.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def load(folder: Path, text: str, *overrides: str) -> PolicyJob:
    return loading.load(PolicyJob, write(folder, text), overrides, environ={}, cwd=folder)


def refused(folder: Path, text: str, *overrides: str) -> list[str]:
    """The sentences, the file's folder left out."""
    with pytest.raises(UserError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def test_values_of_file_overrides_and_defaults(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "rollout.max_new_tokens=45", "learner.policy.lr=1e-5", "log.trackers=[]")
    assert job.rollout.temperature == 0.6
    assert job.rollout.max_new_tokens == 45
    assert job.learner.policy.lr == 1e-5
    assert job.log.trackers == ()
    assert job.rollout.samples_per_prompt == 4


def test_the_last_override_wins_over_the_file_and_over_earlier_ones(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "rollout.temperature=0.7", "rollout.temperature=0.8")
    assert job.rollout.temperature == 0.8


def test_an_override_may_hold_a_section_a_list_or_an_equals_sign(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "data={path: a=b.jsonl}", "learner.policy.betas=[0.8, 0.9]", "data.columns.prompt=q")
    assert job.data.path == "a=b.jsonl"
    assert job.data.columns == {"prompt": "q"}
    assert job.learner.policy.betas == (0.8, 0.9)


def test_an_override_does_not_leak_through_a_yaml_alias(tmp_path: Path) -> None:
    text = GOOD + "learner:\n  policy: &o {lr: 1.0e-3}\n  critic: *o\n"
    job = load(tmp_path, text, "learner.policy.lr=2.0e-3")
    assert (job.learner.policy.lr, job.learner.critic.lr) == (2e-3, 1e-3)


def test_unknown_keys_are_refused_with_line_and_nearest_name(tmp_path: Path) -> None:
    text = GOOD + "  temprature: 0.7\n  lr: 1\nzzz: 1\n"
    assert refused(tmp_path, text, "eval.num_promts=3") == [
        "job.yaml:8: rollout.temprature is unknown; did you mean rollout.temperature?",
        "job.yaml:9: rollout.lr is unknown; did you mean learner.policy.lr or learner.critic.lr?",
        "command line: eval.num_promts is unknown; did you mean eval.num_prompts?",
        "job.yaml:10: zzz is unknown",
    ]


def test_the_config_of_another_job_is_refused_with_its_name(tmp_path: Path) -> None:
    folder = Path(t2g.__file__).parent.parent / "configs" / "own"
    for schema, name, other in (
        (PolicyJob, "sft", "jobs.train_sft"),
        (SFTJob, "policy", "jobs.train_policy"),
        (PolicyJob, "evaluate_policy", "jobs.evaluate --what policy"),
    ):
        file = folder / f"{name}.yaml"
        with pytest.raises(UserError) as raised:
            loading.load(schema, file)
        first, *others = str(raised.value).splitlines()
        assert first == f"{file} has the sections of a config of {other}"
        assert others
    file = tmp_path / "job.yaml"
    file.write_text(GOOD)
    with pytest.raises(UserError, match=r"^command line: zzz is unknown$"):
        loading.load(PolicyJob, file, ["zzz=1"])


def test_a_removed_key_is_refused_with_what_replaces_it(tmp_path: Path) -> None:
    (sentence,) = refused(tmp_path, GOOD + "refresh: {rounds: 2, samples: 500}\n")
    assert sentence.startswith("job.yaml:8: refresh was removed: ")
    assert "jobs.annotate" in sentence and "jobs.train_reward" in sentence


@pytest.mark.parametrize(
    ("override", "new"),
    [
        ("objective.w_span=1", "objective.span_coef"),
        ("objective.w_end=1", "objective.outcome_rewards"),
        ("objective.rewards.cut=-1", "objective.truncation_penalty"),
        ("objective.loss_mean=token", "objective.loss_aggregation"),
        ("objective.importance=none", "objective.rollout_correction"),
        ("objective.importance_cap=3", "objective.rollout_correction_cap"),
        ("cluster.colocate=true", "cluster.gpu_sharing=alternate"),
        ("stages=demo.yaml", "artifacts"),
        ("rollout.health.probe_every_s=1", "check_interval_s"),
        ("log.tensorboard=false", "log.trackers"),
        ("log.wandb_project=mine", "log.project"),
    ],
)
def test_a_key_of_version_0_1_is_refused_with_the_new_one(tmp_path: Path, override: str, new: str) -> None:
    (sentence,) = refused(tmp_path, GOOD, override)
    assert sentence.startswith(f"command line: {override.partition('=')[0]} was re")
    assert new in sentence
    guide = (Path(t2g.__file__).parent / "guides/migrate-to-0.2.md").read_text()
    assert f"`{override.partition('=')[0]}" in guide
    assert f"`{new}`" in guide


def test_a_renamed_key_of_every_engine_is_refused_with_the_new_one(tmp_path: Path) -> None:
    (sentence,) = refused(tmp_path, GOOD, "feedback.engine.health.probe_timeout_s=1")
    assert sentence.endswith(
        "feedback.engine.health.probe_timeout_s was renamed to check_timeout_s in the same section"
    )


def test_the_text_none_is_refused_with_null(tmp_path: Path) -> None:
    (sentence,) = refused(tmp_path, GOOD, "objective.kl_target=none")
    assert sentence == "command line: objective.kl_target: got the text none, needs null for no value"


def test_all_wrong_values_are_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("0.6", "hot") + "num_steps: 0\n"
    overrides = ("rollout.workers=0", "objective.whiten=most", "learner.critic.lr=.nan")
    assert set(refused(tmp_path, text, *overrides)) == {
        "job.yaml:8: num_steps: got 0, needs greater than or equal to 1",
        "command line: rollout.workers.initial: got 0, needs greater than or equal to 1 (engines at the start)",
        'job.yaml:7: rollout.temperature: got "hot", needs a valid number, unable to parse string as a number',
        "command line: objective.whiten: got \"most\", needs 'full', 'scale_only' or 'none' "
        "(normalization over the tokens of the step; default full, with group_normalised none, with unlikely "
        "scale_only)",
        "command line: learner.critic.lr: got NaN, needs a finite number",
    }


def test_what_is_beside_a_gpu_has_as_many_threads_as_cores() -> None:
    """AdamW of DeepSpeed in host memory, offload=cpu, is as fast as its threads are many."""
    assert [LearnerConfig(**sizes).threads for sizes in ({}, {"cpus": 8}, {"gpus": 1}, {"gpus": 0.4, "cpus": 6.5})] == [
        1, 1, 1, 6,
    ]  # fmt: skip
    learner = LearnerConfig(gpus=1, cpus=8)
    assert (learner.threads, with_overrides(learner, {"gpus": 0}).threads) == (8, 1)
    assert with_overrides(learner, {"threads": 2}).threads == 2


def test_an_engine_on_gpus_has_other_defaults(tmp_path: Path) -> None:
    def of(*overrides: str) -> tuple[int, float]:
        rollout = load(tmp_path, GOOD, *overrides).rollout
        return rollout.max_num_seqs, rollout.start_timeout_s

    assert of() == (64, 240)
    assert of("rollout.gpus=1") == of("rollout.gpus=0.6") == (512, 1200)
    assert of("rollout.gpus=1", "rollout.max_num_seqs=96", "rollout.start_timeout_s=60") == (96, 60)


def test_vllms_own_arguments_pass_through(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "rollout.engine_args={quantization: fp8}", "rollout.engine_args.block_size=32")
    assert job.rollout.engine_args == {"quantization": "fp8", "block_size": 32}


def test_the_environment_of_engines_and_ranks_is_text_without_secrets(tmp_path: Path) -> None:
    cluster = load(tmp_path, GOOD, "cluster.env={NCCL_IB_HCA: mlx5, NCCL_IB_PKEY: 1}").cluster
    assert cluster.env == {"NCCL_IB_HCA": "mlx5", "NCCL_IB_PKEY": "1"}
    for name in ("HF_TOKEN", "aws_secret", "OPENAI_API_KEY", "DB_PASSWD", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        (sentence,) = refused(tmp_path, GOOD, f"cluster.env.{name}=x")
        assert sentence.startswith(f"command line: cluster.env: {name} cannot be set here")


@pytest.mark.parametrize(("tokens", "deadline_s"), [(16, 90), (256, 90), (1024, 360)])
def test_a_longer_output_limit_has_a_longer_deadline(tokens: int, deadline_s: float) -> None:
    engine = RewardEngineConfig(max_new_tokens=tokens, request_timeout_s=90)
    assert engine.deadline_s == engine.compute_deadline_s(tokens) == deadline_s


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rollout.gpus=1.5"], "command line: rollout.gpus: got 1.5, needs a part of one GPU or whole ones"),
        (
            ["rollout.engine_args={block_size: 32, seed: 3}"],
            "command line: rollout.engine_args: seed cannot be set: it",
        ),
        (
            ["rollout.engine_args.temperature=0.5"],
            "command line: rollout.engine_args: temperature is a setting of sampling and not of an engine",
        ),
        (
            ["rollout.engine_args.logprobs_mode=raw"],
            "command line: rollout.engine_args: logprobs_mode cannot be set: ",
        ),
        # The file has lines for these sections, and is right.
        (["rollout.max_new_tokens=5000"], "command line: rollout: max_new_tokens=5000 leaves no room"),
        (["feedback.source=human"], "command line: feedback: source=human needs human_file"),
        (["objective.advantages=group", "rollout.samples_per_prompt=1"], "command line: objective.advantages=group "),
        (["data={split: x}"], "command line: data.path is missing"),
        (["data.path="], "command line: data.path: got null"),
        # The fault of the file, whatever else of the section the command line gives.
        (["rollout.max_new_tokens=5", "rollout.temprature=1"], "command line: rollout.temprature is unknown"),
    ],
)
def test_an_override_is_blamed_on_the_command_line(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    assert refused(tmp_path, GOOD, *overrides)[0].startswith(sentence)


def test_the_file_is_blamed_for_its_own_fault_whatever_is_laid_over_its_section(tmp_path: Path) -> None:
    text = GOOD + "  max_new_tokens: 5000\nlearner: {sync_transport: nccl}\n"
    sentences = refused(tmp_path, text, "rollout.temperature=0.9", "learner.cpus=2")
    assert sentences[0].startswith("job.yaml:6: rollout: max_new_tokens=5000 leaves no room")
    assert refused(tmp_path, GOOD + "  temperature: hot\n", "num_steps=3")[0].startswith("job.yaml:8: rollout.temp")
    # Whole only with the command line, and then wrong by itself.
    gap = "model: {policy: m}\nfeedback: {source: program}\nlearner: {sync_transport: nccl}\n"
    (error_text,) = refused(tmp_path, gap, "data.path=d")
    assert error_text.startswith("job.yaml: learner.sync_transport=nccl needs GPUs")
    (error_text,) = refused(tmp_path, gap, "data.path=d", "cluster.gpu_sharing=split", "learner.sync_transport=ipc")
    assert error_text.startswith("command line: learner.sync_transport=ipc needs GPUs")


def test_what_is_missing_is_named_with_its_meaning(tmp_path: Path) -> None:
    text = "model: {policy: base}\ndata: {split: test}\nfeedback: {source: human}\n"
    assert refused(tmp_path, text) == [
        "job.yaml:2: data.path is missing; it needs: JSON, JSON lines, CSV or Parquet file, "
        "a folder of them, a list of these, or a hub dataset",
        "job.yaml:3: feedback: source=human needs human_file",
    ]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("temperature", f"command line: got 'temperature', needs the form section.key=value{loading.QUOTES}"),
        ("rollout..x=1", "command line: got 'rollout..x=1', needs the form section.key=value"),
        ("data.limit=[1", f"command line: data.limit: '[1' is not valid YAML{loading.QUOTES}"),
        ("data.path.x=1", "command line: data.path.x=1: data.path is a value, not a section"),
    ],
)
def test_malformed_overrides(tmp_path: Path, override: str, sentence: str) -> None:
    assert refused(tmp_path, GOOD, override) == [sentence]


def test_braces_that_a_shell_expanded_are_answered_with_quotes(tmp_path: Path) -> None:
    (split,) = refused(tmp_path, GOOD, "learner.lora=r:16", "learner.lora=alpha:32")
    assert split.startswith("command line: learner.lora: ") and split.endswith(loading.QUOTES)
    (once,) = refused(tmp_path, GOOD, "learner.lora=alpha:32")
    assert not once.endswith(loading.QUOTES)


def test_aliases_are_followed(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD.replace("data:", "data: &data") + "eval_data: *data\n")
    assert job.eval_data == job.data


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: [1\n", r"job\.yaml:3: broken YAML: .*expected ',' or ']'.*"),
        ("data:\n  path: a\n  path: b\n", r"job\.yaml:3: data\.path is given twice, first in line 2"),
        ("- 1\n", r"job\.yaml:1: got \[1\], needs a mapping of keys to values"),
        ("a: \x00\n", r"job\.yaml: broken YAML: .*special characters are not allowed.*"),
        ("run: 2026-99-99\n", r"job\.yaml: broken YAML: month must be in 1\.\.12"),
        ("[" * 100_000, r"job\.yaml: broken YAML: values are nested too deeply"),
        ("a: &a [*a]\n", r"job\.yaml: broken YAML: values are nested too deeply"),
        ("a: &a {b: *a}\n", r"job\.yaml: broken YAML: values are nested too deeply"),
    ],
)
def test_broken_files_are_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (problem,) = refused(tmp_path, text)
    assert re.fullmatch(sentence, problem), problem


def test_an_empty_file_lacks_what_is_required(tmp_path: Path) -> None:
    assert refused(tmp_path, "# nothing\n") == [
        "job.yaml: model is missing",
        "job.yaml: data is missing",
        "job.yaml: feedback is missing",
    ]


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: the config cannot be read: No such file or directory"):
        loading.load(PolicyJob, tmp_path / "none.yaml")
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not UTF-8 text"):
        loading.load(PolicyJob, tmp_path / "job.yaml")


def test_run_root_is_absolute_at_once(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).run.folder == tmp_path / "runs" / "run"
    assert load(tmp_path, GOOD, "run.root=../x").run.root == tmp_path.parent / "x"
    assert load(tmp_path, GOOD, "run.root=/data/runs").run.root == Path("/data/runs")
    assert load(tmp_path, GOOD, "run.root=~/runs").run.root == Path.home() / "runs"


@pytest.mark.parametrize(
    ("environ", "cwd"),
    [({loading.JOB_ENV: "{}"}, "/somewhere"), ({}, "/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_1")],
)
def test_a_relative_root_is_refused_under_a_ray_job(tmp_path: Path, environ: dict[str, str], cwd: str) -> None:
    file = write(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"run\.root: got 'runs', but a Ray job needs an absolute path"):
        loading.load(PolicyJob, file, environ=environ, cwd=Path(cwd))
    job = loading.load(PolicyJob, file, ["run.root=/data"], environ=environ, cwd=Path(cwd))
    assert job.run.root == Path("/data")


def test_local_paths_are_absolute_and_hub_names_stay(tmp_path: Path) -> None:
    (tmp_path / "models" / "policy").mkdir(parents=True)
    (tmp_path / "models" / "reward").mkdir()
    for name in ("train.jsonl", "human.jsonl", "demo.yaml"):
        (tmp_path / name).touch()
    local = [
        "model.policy=models/policy",
        "data.path=train.jsonl",
        "eval_data.path=./train.jsonl",
        "feedback.reward_model=models/../models/reward",
        "feedback.human_file=human.jsonl",
        "artifacts=demo.yaml",
    ]
    job = load(tmp_path, GOOD, *local)
    assert (job.model.policy, job.feedback.reward_model) == (f"{tmp_path}/models/policy", f"{tmp_path}/models/reward")
    assert job.eval_data is not None
    assert {job.data.path, job.eval_data.path} == {f"{tmp_path}/train.jsonl"}
    assert job.feedback.human_file == f"{tmp_path}/human.jsonl"
    assert job.artifacts == tmp_path / "demo.yaml"

    hub = load(tmp_path, GOOD, "model.policy=org/model", "data.path=org/data", "eval_data.path=org/x")
    assert (hub.model.policy, hub.data.path, hub.feedback.reward_model) == ("org/model", "org/data", None)
    assert hub.eval_data is not None and hub.eval_data.path == "org/x"

    copy = tmp_path / f"{loading.UPLOAD_PREFIX}1"  # another name in the job that resumes the run
    copy.mkdir()
    (copy / "train.jsonl").touch()
    file = write(tmp_path, GOOD)
    uploaded = loading.load(PolicyJob, file, ["data.path=train.jsonl", "run.root=/data"], environ={}, cwd=copy)
    assert uploaded.data.path == "train.jsonl"


def test_the_model_of_an_endpoint_is_a_name_and_of_own_engines_perhaps_a_folder(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    named = load(tmp_path, GOOD, "feedback.llm.model=judge")
    served = load(tmp_path, GOOD, "feedback.llm.model=judge", "feedback.llm.url=http://host/v1")
    assert (named.feedback.llm.model, served.feedback.llm.model) == (f"{tmp_path}/judge", "judge")


def test_data_may_be_the_human_file(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").touch()
    (tmp_path / "other.csv").touch()

    def read(*overrides: str) -> AnnotateJob:
        text = "data: {path: mine.csv, columns: {prompt: q}}\nannotate: {source: human}\n"
        return loading.load(AnnotateJob, write(tmp_path, text), overrides, environ={}, cwd=tmp_path)

    alone = read()
    assert alone.annotate.human_file == alone.data.path == f"{tmp_path}/mine.csv"
    assert alone.annotate.human_columns == {"prompt": "q"}
    beside = read("annotate.human_file=other.csv")
    assert (beside.annotate.human_file, beside.annotate.human_columns) == (f"{tmp_path}/other.csv", {})
    assert loading.load(AnnotateJob, loading.write(alone, tmp_path / "run"), environ={}) == alone


@pytest.mark.parametrize("section", ["rollout", "feedback.engine"])
def test_an_engine_needs_room_for_a_prompt(tmp_path: Path, section: str) -> None:
    load(tmp_path, GOOD, f"{section}.max_new_tokens=99", f"{section}.max_model_len=100")
    assert refused(tmp_path, GOOD, f"{section}.max_new_tokens=100", f"{section}.max_model_len=100")[0].endswith(
        f"{section}: max_new_tokens=100 leaves no room for a prompt in max_model_len=100; it needs to be smaller"
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 1e-3),
        (["learner.dtype=bfloat16"], 0.25),
        (["rollout.dtype=bfloat16"], 0.25),
        (["rollout.gpus=1"], 0.03),
        (["rollout.gpus=1", "rollout.dtype=bfloat16"], 0.25),
        (["rollout.dtype=bfloat16", "learner.probe_tolerance=0.1"], 0.1),
        (["learner.probe_tolerance=0.1"], 0.1),
    ],
)
def test_the_probe_allows_for_the_rounding_of_either_side(
    tmp_path: Path, overrides: list[str], expected: float
) -> None:
    job = load(tmp_path, GOOD, *overrides)
    assert job.learner.resolve_probe_tolerance(job.rollout) == expected
    assert loading.load(PolicyJob, loading.write(job, tmp_path / "run"), environ={}) == job
    (tmp_path / "demo.yaml").write_text("num_steps: 1\n")
    demo = loading.load(DemoJob, tmp_path / "demo.yaml", overrides, environ={}, cwd=tmp_path)
    assert demo.learner.resolve_probe_tolerance(demo.rollout) == expected
    assert LearnerConfig(dtype="bfloat16").resolve_probe_tolerance(RolloutConfig()) == 0.25, "without a job as well"
    tolerances = {None: 0.25, 0.1: 0.25, 3.0: 3.0}  # an export rounds merged adapters as a weight sync does
    for probe_tolerance, export_tolerance in tolerances.items():
        learner = LearnerConfig(dtype="bfloat16", probe_tolerance=probe_tolerance)
        assert learner.export_tolerance == export_tolerance


def test_a_wrong_learner_is_one_sentence(tmp_path: Path) -> None:
    (sentence,) = refused(tmp_path, GOOD, "learner.cpus=0")
    assert sentence.startswith("command line: learner.cpus: got 0, needs greater than 0")


KEY = "sk-proj-4rT9secret"


@pytest.mark.parametrize(
    "override",
    [
        *(f"feedback.llm.{field}={KEY}" for field in ("key_env", "model", "url", "api_key")),
        "feedback.llm.key_env=9secret9secret9secret9secret9secret",
        "feedback.llm.key_env=four.secret",
        "feedback.llm.model=9secret9secret9secret9secret9secret",
        f"feedback.llm={KEY}",
        f"feedback.llm.concurrency={KEY}",
        f"feedback.source={KEY}",
        "feedback.llm.url=four-secret",
        f"feedback.llm.url=https://host/{KEY}/v1",
        "feedback.llm.url=https://me:secret@host/v1",
        "feedback.llm.url=https://host/v1?api-version=secret",
        "feedback.llm.url=https://host:secret/v1",
        "data.path=https://host/data.jsonl?token=secret",
        "cluster.env={HTTPS_PROXY: 'http://me:sec/ret-secret@proxy:80'}",
        f"{KEY}=1",
        KEY,
        "model.policy=value-of-a-variable-with-a-secret",
    ],
)
def test_a_key_in_a_wrong_field_is_refused_in_a_sentence_without_it(
    tmp_path: Path, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_API_KEY", "value-of-a-variable-with-a-secret")
    (sentence,) = refused(tmp_path, GOOD, override)
    assert "secret" not in sentence.partition(":")[2] and sentence.startswith("command line: ")
    if "=" in override and KEY not in override.partition("=")[0]:
        assert override.partition("=")[0] in sentence


def test_a_key_in_the_file_is_refused_with_its_line(tmp_path: Path) -> None:
    sentences = refused(tmp_path, GOOD + f"cluster:\n  env: {{A: {KEY}}}\n  address: ray://me:secret@head:10001\n")
    assert [sentence.partition(" holds")[0] for sentence in sentences] == [
        "job.yaml:9: cluster.env.A",
        "job.yaml:10: cluster.address",
    ]
    assert "secret" not in str(sentences)


def test_text_that_only_resembles_keys_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MY_KEY_FILE", "/home/me/keys.json")
    names = ("task-12345678", "sklearn/sk-learn", "/models/hf_llama3-8b-instruct", "EMPTY", "/home/me/keys.json")
    for name in names:
        assert load(tmp_path, GOOD, f"model.policy={name}").model.policy == name
    for url in ("https://host/v1/@x", "http://[::1]:8000/v1", "http://127.0.0.1:8000"):
        assert load(tmp_path, GOOD, f"feedback.llm.url={url}").feedback.llm.url == url


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ('model.policy="a\\nb"', "command line: model.policy holds a line break, "),
        ('rollout.labels={team: "a\\nb"}', "command line: rollout.labels.team holds a line break, "),
        ('rollout.labels={"a\\u202eb": x}', r"command line: rollout.labels.a\u202eb holds a line break, "),
        ('feedback.llm.model="a\\x1b[2J"', "command line: feedback.llm.model holds a line break, "),
        ('cluster.env={"A\\nB": x}', r"command line: cluster.env.A\nB holds a line break, "),
        ("cluster.env={A B: x}", "command line: cluster.env: 'A B' is not a name of an environment variable"),
    ],
)
def test_control_characters_in_names_and_values_are_one_sentence(tmp_path: Path, override: str, sentence: str) -> None:
    (problem,) = refused(tmp_path, GOOD, override)
    assert problem.startswith(sentence) and problem.isprintable()


@settings(deadline=None, max_examples=30)
@given(st.text())
def test_a_masked_text_holds_no_secret(text: str) -> None:
    masked = mask_secrets(f"{text} {KEY} {text}", {})
    assert mask_secrets(masked, {}) == masked
    assert KEY not in masked or text.endswith(("-", ".")) or KEY in text


def test_secrets_of_the_environment_are_masked_whole(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.touch()
    secret = "opensesame-1234"
    environ = {"A_KEY": secret, "B_KEY": f"{secret}-extended", "C_KEY": "/+base64/begins/so==", "D_KEY": str(path)}
    text = " ".join(environ.values())
    assert mask_secrets(text, environ) == f"*** *** *** {path}"


@pytest.mark.parametrize("header", ["Authorization: Basic dXNlcjpwYXNz", "{'authorization': 'Basic dXNlcjpwYXNz'}"])
def test_a_header_with_user_and_password_is_masked(header: str) -> None:
    assert "dXNl" not in mask_secrets(header, {})
    assert mask_secrets("basic understanding", {}) == "basic understanding"


@pytest.mark.parametrize("override", ["methods=[]", "world.seed=-1"])
def test_a_demo_without_a_method_or_with_a_negative_seed_is_refused(tmp_path: Path, override: str) -> None:
    (tmp_path / "demo.yaml").write_text("num_steps: 1\n")
    with pytest.raises(UserError, match=override.partition("=")[0]):
        loading.load(DemoJob, tmp_path / "demo.yaml", [override], environ={}, cwd=tmp_path)


def test_the_resolved_config_reads_back_equal(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD, "data.columns={prompt: 'é: 漢'}", "learner.policy.lr=1e-7")
    folder = tmp_path / "run"
    assert loading.load(PolicyJob, loading.write(job, folder), environ={}, cwd=Path("/")) == job
    assert [file.name for file in folder.iterdir()] == ["config.yaml"]
    assert set(loading.flatten(yaml.safe_load(loading.to_yaml(job)))) >= {"learner.critic.lr", "run.root"}


@pytest.mark.parametrize(
    ("job", "key", "free"),
    [
        (PolicyJob, "num_steps", True),
        (PolicyJob, "run.root", True),
        (PolicyJob, "log.num_samples", True),
        (PolicyJob, "rollout.workers.max", True),
        (PolicyJob, "feedback.engine.workers.initial", True),
        (PolicyJob, "rollout.max_staleness", False),
        (PolicyJob, "learner.cpus", True),
        (PolicyJob, "feedback.engine.labels.zone", True),
        (PolicyJob, "learner.step_timeout_s", True),
        (SFTJob, "sft.timeout_s", True),
        (DemoJob, "policy_sft.timeout_s", True),
        (PolicyJob, "feedback.timeout_s", False),  # decides which samples are judged
        (AnnotateJob, "annotate.timeout_s", True),
        (AnnotateJob, "annotate.llm.concurrency", True),
        (PolicyJob, "feedback.llm.requests_per_minute", True),
        (AnnotateJob, "annotate.llm.request_timeout_s", True),
        (AnnotateJob, "annotate.llm.model", False),
        (AnnotateJob, "annotate.sandbox.timeout_s", False),
        (AnnotateJob, "annotate.style.labels", False),
        (PolicyJob, "learner.workers", True),
        (SFTJob, "sft.workers", False),
        (PolicyJob, "learner.critic_ranks", True),
        (PolicyJob, "learner.critic_ranks.workers", True),
        (PolicyJob, "learner.tokens_per_microbatch", True),
        (PolicyJob, "learner.share_prompts", True),
        (SFTJob, "sft.tokens_per_microbatch", False),  # decides which units dropout meets
        (SFTJob, "sft.gradient_checkpointing", True),
        (SFTJob, "sft.offload", True),
        (PolicyJob, "learner.offload", False),
        (PolicyJob, "run.seed", False),
        (PolicyJob, "rollout.temperature", False),
        (PolicyJob, "eval.num_prompts", False),
        (PolicyJob, "model.policy", False),
        (CompareJob, "compare.noise.flipped.flip", True),
        (PolicyJob, "a.key.of.yesterday", False),
    ],
)
def test_keys_in_which_a_resumed_run_may_differ(job: type[Section], key: str, free: bool) -> None:
    assert can_change_on_resume(job, key) is free


def test_the_identity_of_a_run_is_what_may_not_differ(tmp_path: Path) -> None:
    one = loading.identity_values(load(tmp_path, GOOD, "num_steps=5", "rollout.workers=2"))
    assert one == loading.identity_values(load(tmp_path, GOOD))
    assert "rollout.temperature" in one
    assert one != loading.identity_values(load(tmp_path, GOOD, "run.seed=2"))


@pytest.mark.parametrize(
    ("transport", "overrides", "sentence"),
    [
        ("nccl", "rollout.gpus=1", "needs GPUs on both sides, got rollout.gpus=1 and learner.gpus=0; without them"),
        (
            "ipc",
            "learner.gpus=0.4 cluster.gpu_sharing=split",
            "needs GPUs on both sides, got rollout.gpus=0 and learner.gpus=0.4",
        ),
        ("nccl", "rollout.gpus=0.5 learner.gpus=1", "needs a whole GPU for each engine and rank, got rollout.gpus=0.5"),
        (
            "ipc",
            "rollout.gpus=0.5 learner.gpus=0.5 cluster.gpu_sharing=split",
            "needs one engine and one rank on each GPU: rollout.gpus above",
        ),
        ("ipc", "rollout.gpus=0.7 learner.gpus=0.2 cluster.gpu_sharing=split", "learner.gpus the rest of 1"),
        (
            "ipc",
            "rollout.gpus=0.7 learner.gpus=0.3 rollout.workers=2 cluster.gpu_sharing=split",
            "1 to 2 engines and learner.workers=1",
        ),
        ("ipc", "rollout.gpus=0.7 learner.gpus=0.3 rollout.labels.a=b cluster.gpu_sharing=split", "the same labels"),
        ("nccl", "rollout.gpus=1 learner.gpus=1 learner.sync_verify=full", "sync_verify=full needs sync_transport=sto"),
        (
            "ipc",
            "rollout.gpus=0.6 learner.gpus=0.4 feedback.engine.gpus=0.4 cluster.gpu_sharing=split "
            "feedback.source=reward_model feedback.reward_model=m",
            "feedback.engine.gpus is 0.4",
        ),
        ("nccl", "rollout.gpus=1 learner.gpus=1", ""),
        ("ipc", "rollout.gpus=0.7 learner.gpus=0.3 cluster.gpu_sharing=split", ""),
    ],
)
def test_weights_travel_only_where_the_gpus_are(tmp_path: Path, transport: str, overrides: str, sentence: str) -> None:
    chosen = (f"learner.sync_transport={transport}", *overrides.split())
    if not sentence:
        assert load(tmp_path, GOOD, *chosen).learner.sync_transport == transport
        return
    (error_text,) = refused(tmp_path, GOOD, *chosen)
    assert sentence in error_text and (transport in error_text or "gpu_sharing=split" in error_text)


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        ("", "store"),
        ("rollout.gpus=2 learner.gpus=1", "nccl"),
        ("rollout.gpus=1", "store"),
        ("rollout.gpus=0.6 learner.gpus=0.4", "store"),
        ("rollout.gpus=1 learner.gpus=1 learner.sync_verify=full", "store"),
        ("rollout.gpus=1 learner.gpus=1 cluster.gpu_sharing=alternate", "ipc"),
    ],
)
def test_a_job_takes_the_transport_that_its_gpus_are_for(tmp_path: Path, overrides: str, transport: str) -> None:
    job = load(tmp_path, GOOD, *overrides.split())
    assert job.learner.sync_transport == transport
    assert loading.load(PolicyJob, loading.write(job, tmp_path / "run"), environ={}) == job


@pytest.mark.parametrize("section", ["learner", "learner.critic_ranks"])
def test_a_rank_has_one_gpu(tmp_path: Path, section: str) -> None:
    (error_text,) = refused(tmp_path, GOOD, "rollout.gpus=1", "learner.gpus=1", f"{section}.gpus=4")
    assert section in error_text and "gpus=4, and a rank uses one GPU" in error_text


def test_an_engine_has_at_most_its_share_of_the_memory(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, "rollout.gpus=0.6").rollout.gpu_memory_utilization == 0.6
    assert load(tmp_path, GOOD, "rollout.gpus=1").rollout.gpu_memory_utilization == 0.85


@pytest.mark.parametrize(
    ("overrides", "need"),
    [
        ("rollout.gpus=2", "with alternate 1 and 1"),
        ("learner.gpus=0.4", "with alternate 1 and 1"),
        ("rollout.workers={min: 1, max: 2}", "rollout.workers from min to max as many"),
        ("rollout.max_staleness=1", "rollout.max_staleness=0"),
        ("learner.sync_transport=store", "sync_transport=store"),
        ("learner.offload=cpu", "learner.offload=none"),
    ],
)
def test_time_sharing_is_refused_where_it_cannot_work(tmp_path: Path, overrides: str, need: str) -> None:
    gpu_sharing = ("cluster.gpu_sharing=alternate", "rollout.gpus=1", "learner.gpus=1")
    rollout, learner = load(tmp_path, GOOD, *gpu_sharing).reserved
    assert 0.5 < rollout.gpus < 1, "in Ray's books"
    assert rollout.gpus + learner.gpus == 1, "in Ray's books"
    assert rollout.gpu_memory_utilization == 0.85, "in its turn an engine has the GPU to itself"
    (error_text,) = refused(tmp_path, GOOD, *gpu_sharing, overrides)
    assert "gpu_sharing=alternate" in error_text and need in error_text


def test_shown_values_stay_on_one_line_and_short() -> None:
    assert format_value("a\nb") == '"a\\nb"'
    assert len(format_value("x" * 1000)) == 80


@given(st.dictionaries(st.text("ab.é", max_size=4), st.integers() | st.text("ab", max_size=4)))
def test_flat_keeps_every_value(values: dict[str, int | str]) -> None:
    assert sorted(map(str, loading.flatten({"a": values, "b": 1}).values())) == sorted(
        [*map(str, values.values()), "1"] if values else ["{}", "1"]
    )


def test_a_derived_config_is_checked_whole(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD)
    changed = with_overrides(job, {"learner.policy.lr": 1e-4, "learner.critic.lr": 2e-4, "rollout.workers": 3})
    assert (changed.learner.policy.lr, changed.learner.critic.lr, changed.rollout.workers.max) == (1e-4, 2e-4, 3)
    assert differing(job, changed) == {
        "learner.critic.lr", "learner.policy.lr", "rollout.workers.initial", "rollout.workers.max",
    }  # fmt: skip
    assert "task" not in changed.model_fields_set and "lr" in changed.learner.policy.model_fields_set
    for wrong in (
        {"learner.policy.lr": -1.0},
        {"learner.polcy": 1},
        {"rollout.max_new_tokens": 5000},
        {"objective.advantages": "group", "rollout.samples_per_prompt": 1},
    ):
        with pytest.raises(ValidationError):
            with_overrides(job, wrong)
    unchecked = job.rollout.model_copy(update={"temperature": -1.0})
    with pytest.raises(ValidationError, match=r"rollout\.temperature"):
        PolicyJob(model=job.model, data=job.data, feedback=job.feedback, rollout=unchecked)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.name=2026-11-28", "run.name"),
        ("run.name=20261128", "run.name"),
        ("run.name=on", "run.name"),
        ("data.revision=0123456", "data.revision"),
    ],
)
def test_a_text_of_the_command_line_is_a_text(tmp_path: Path, override: str, key: str) -> None:
    """YAML would make a date, a number or a boolean of it."""
    file = tmp_path / "job.yaml"
    file.write_text("model: {policy: base}\ndata: {path: owner/prompts}\nfeedback: {source: program}\n")
    config = loading.load(PolicyJob, file, [override, "num_steps=7", "data.subset=null"])
    values = loading.flatten(config.model_dump(mode="json"))
    assert values[key] == override.partition("=")[2]
    assert (values["num_steps"], values["data.subset"]) == (7, None)


def test_defaults_of_the_objective_follow_its_advantages() -> None:
    """Alone, under an override of a job that was read, and through a method file's dotted keys."""

    def resolved(job: PolicyJob) -> tuple[str, ...]:
        o = job.objective
        return o.advantages, o.whiten, o.kl_estimator, o.loss_aggregation, o.rewards.unit, o.rewards.placement

    base = PolicyJob(model={"policy": "m"}, data={"path": "d"}, feedback={"source": "program"})  # type: ignore[arg-type]
    assert base.rollout.samples_per_prompt >= 4
    assert resolved(base) == ("group", "full", "k3", "token", "span", "span")
    for name, expected in (
        ("gae", ("gae", "full", "k1", "token", "span", "span")),
        ("group_normalised", ("group_normalised", "none", "k3", "sequence", "span", "span")),
    ):
        changed = with_overrides(base, {"objective.advantages": name})
        assert resolved(changed) == expected
        assert resolved(with_overrides(changed, {"objective.advantages": "group"})) == resolved(base)
    explicit = with_overrides(base, {"objective.kl_estimator": "k1", "objective.advantages": "group_normalised"})
    assert resolved(explicit)[:3] == ("group_normalised", "none", "k1")
    for alone in ({"rollout.samples_per_prompt": 1}, {"learner.critic_warmup_steps": 2}):
        assert resolved(with_overrides(base, alone))[:3] == ("gae", "full", "k1")
    judge = {"source": "reward_model", "reward_model": "m"}
    code = with_overrides(base, {"task": "code", "feedback": judge, "objective.advantages": "gae"})
    assert (code.objective.rewards.poor, code.objective.kl_estimator) == ((0.0, -1.0, -1.0), "k1")


def test_what_follows_from_other_sections_goes_when_they_do() -> None:
    base = PolicyJob(model={"policy": "m"}, data={"path": "d"}, feedback={"source": "program"})  # type: ignore[arg-type]
    alone = with_overrides(base, {"rollout.samples_per_prompt": 1})
    assert (alone.objective.advantages, alone.objective.kl_estimator) == ("gae", "k1")
    again = with_overrides(alone, {"rollout.samples_per_prompt": 4})
    assert again.objective == base.objective
    on_gpus = with_overrides(base, {"rollout.gpus": 1, "learner.gpus": 1})
    assert (on_gpus.learner.sync_transport, on_gpus.rollout.max_num_seqs) == ("nccl", 512)
    assert with_overrides(on_gpus, {"rollout.gpus": 0, "learner.gpus": 0}) == base
    engine = with_overrides(RolloutConfig(), {"gpus": 1})
    assert (engine.max_num_seqs, engine.start_timeout_s) == (512, 1200)
    assert with_overrides(RolloutConfig(max_num_seqs=64), {"gpus": 1}).max_num_seqs == 64
    assert with_overrides(DemoJob(), {"run.name": "other"}).rollout == DemoJob().rollout


@pytest.mark.parametrize("tags", ["[<think>]", "[<a>, <a>]", "[<a>, ' ']", "[a, b, c]"])
def test_thinking_tags_are_two_or_none(tmp_path: Path, tags: str) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    assert loading.load(PolicyJob, tmp_path / "job.yaml", ["model.thinking_tags=[]"]).model.thinking_tags == ()
    with pytest.raises(
        UserError, match=r"model.thinking_tags: .* needs an opening and a closing tag, or \[\] for a model"
    ):
        loading.load(PolicyJob, tmp_path / "job.yaml", [f"model.thinking_tags={tags}"])


def test_a_run_from_before_train_thinking_has_the_same_identity(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    job = loading.load(PolicyJob, tmp_path / "job.yaml")
    assert "objective.train_thinking" not in loading.identity_values(job)
    changed = with_overrides(job, {"objective.train_thinking": False})
    assert loading.identity_values(changed)["objective.train_thinking"] is False
    assert loading.load(PolicyJob, loading.write(changed, tmp_path / "run")) == changed


def test_a_removed_key_may_keep_the_value_that_changes_nothing(tmp_path: Path) -> None:
    """So the config.yaml of an earlier run can still be read."""
    rewards = "objective: {rewards: {cover: any, good: 2}}\n"
    assert load(tmp_path, GOOD + rewards).objective.rewards.good == 2
    (sentence,) = refused(tmp_path, GOOD + rewards.replace("any", "half"))
    assert "objective.rewards.cover was removed" in sentence


@pytest.mark.parametrize(("advantages", "lam"), [("group", 1.0), ("group_normalised", 1.0), ("gae", 0.95)])
def test_the_config_of_an_earlier_run_keeps_its_objective(tmp_path: Path, advantages: str, lam: float) -> None:
    job = with_overrides(load(tmp_path, GOOD), {"objective.advantages": advantages})
    written = yaml.safe_load(loading.to_yaml(job))
    del written["objective"]["local_coef"]
    written["objective"]["lam"] = 0.95
    (tmp_path / "earlier.yaml").write_text(yaml.safe_dump(written))
    objective = loading.load(PolicyJob, tmp_path / "earlier.yaml").objective
    assert (objective.local_coef, objective.lam) == (0.0, lam)


@pytest.mark.parametrize(
    ("earlier", "trackers", "project"),
    [
        ({"tensorboard": True, "wandb_project": None}, ("tensorboard",), "t2g"),
        ({"tensorboard": False, "wandb_project": None}, (), "t2g"),
        ({"tensorboard": True, "wandb_project": "mine"}, ("tensorboard", "wandb"), "mine"),
    ],
)
def test_the_config_of_an_earlier_run_keeps_its_trackers(
    tmp_path: Path, earlier: dict[str, object], trackers: tuple[str, ...], project: str
) -> None:
    written = yaml.safe_load(loading.to_yaml(load(tmp_path, GOOD)))
    written["log"] = {**earlier, "num_samples": 3}
    (tmp_path / "earlier.yaml").write_text(yaml.safe_dump(written))
    log = loading.load(PolicyJob, tmp_path / "earlier.yaml").log
    assert (log.trackers, log.project, log.num_samples) == (trackers, project, 3)


@pytest.mark.parametrize(("use", "bound"), [("distill", 2.0), ("scale", 4.0)])
def test_the_config_of_an_earlier_run_keeps_its_teacher(tmp_path: Path, use: str, bound: float) -> None:
    """Every teacher had the bound 4, which a distilled one does not read."""
    written = yaml.safe_load(loading.to_yaml(load(tmp_path, f"{GOOD}objective: {{teacher: {{use: {use}}}}}\n")))
    written["objective"]["teacher"]["bound"] = 4.0
    (tmp_path / "earlier.yaml").write_text(yaml.safe_dump(written))
    teacher = loading.load(PolicyJob, tmp_path / "earlier.yaml").objective.teacher
    assert teacher is not None
    assert (teacher.use, teacher.bound) == (use, bound)


def test_a_target_per_token_is_read_back(tmp_path: Path) -> None:
    job = load(tmp_path, GOOD + "objective: {kl_target_per_token: 0.01}\n")
    assert loading.load(PolicyJob, loading.write(job, tmp_path / "run")) == job


def test_a_config_that_people_write_has_todays_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).objective.local_coef == 0.3
    assert load(tmp_path, GOOD + "objective: {lam: 0.9}\n").objective.lam == 0.9
