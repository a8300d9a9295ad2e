"""`jobs.deploy check`: the plan in words, and one broken example of each thing it sees."""

from pathlib import Path

import pytest

from t2g.config import PolicyJob, loading
from t2g.deploy import check_config
from t2g.errors import UserError
from t2g.resources.job_memory import store_gib

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [ROOT / "configs" / name / "policy.yaml" for name in ("kodcode", "own", "slf5k", "tiny", "ultrafeedback")]
GOOD = (
    "learner.labels.rl/role=learner",
    "rollout.labels.rl/role=rollout",
    "feedback.engine.labels.rl/role=reward",
    "cluster={placement_timeout_s: 1800, object_store_gib: 32}",
    "data.path=/mnt/t2g/slf5k.json",
    "feedback.reward_model=/mnt/t2g/reward",
)


def check(*overrides: str, gpu: str = "A100-80GB", file: str = "slf5k") -> tuple[list[str], list[str]]:
    path = ROOT / "configs" / file / "policy.yaml"
    problems, words = check_config(loading.load(PolicyJob, path, overrides, environ={}, cwd=ROOT), gpu=gpu)
    assert all(f"problem: {problem}" in words for problem in problems)
    return problems, words.splitlines()


def warnings(lines: list[str]) -> list[str]:
    return [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.parent.name)
def test_every_shipped_config_can_be_checked(file: Path) -> None:
    problems, words = check_config(loading.load(PolicyJob, file, environ={}, cwd=ROOT))
    assert "learner: " in words
    assert problems == []


def test_the_plan_is_formatted() -> None:
    _, lines = check(*GOOD, "rollout.workers={min: 12, max: 32}", "rollout.gpus=2")
    assert lines[:4] == [
        "learner: 6 ranks of 1 GPU -> 1 pod; a pod has 6 GPUs, 24 CPUs and 288 GiB for them",
        "rollout: 12 engines of TP 2 -> 3 pods, at most 8; a pod has 8 GPUs, 16 CPUs and 96 GiB for them",
        "reward: 1 engine of TP 1 -> 1 pod; a pod has 1 GPU, 4 CPUs and 24 GiB for them",
        "in all: 31 GPUs, at most 71, and a head without workers",
    ]


def test_an_engine_of_three_gpus_cannot_have_32_heads() -> None:
    problems, _ = check(*GOOD, "rollout.gpus=3", "feedback.engine.gpus=2")
    assert problems == ["rollout.gpus is 3, and the model has 32 attention heads; take a number that divides them"]


def test_a_run_without_faults() -> None:
    problems, lines = check(*GOOD)
    assert problems == []
    assert lines[-1] == "no problems found"


def test_the_table_adds_up() -> None:
    _, lines = check(*GOOD)
    (header,) = [line.split() for line in lines if line.split()[-1:] == ["total"]]
    (row,) = [line.split() for line in lines if line.startswith("  learner")]
    cells = dict(zip(header, row[1:], strict=True))
    # 8,030,261,248 parameters twice and 7,504,924,672 of the critic over 6 ranks, in GiB.
    assert cells["weights"] == "7.3"
    assert cells["gradients"] == "9.6"
    assert cells["optimizer"] == "28.9"
    assert cells["activations"] == "7.1"  # of 16,384 tokens, each layer's input and one layer
    parts = [float(size) for name, size in cells.items() if name != "total" and size != "-"]
    assert float(cells["total"]) == pytest.approx(sum(parts), abs=0.5)


def test_a_model_of_unknown_size_has_no_estimate() -> None:
    problems, lines = check("model.policy=nobody/has-this", *GOOD)
    assert problems == []
    assert "no estimate of GPU memory" in lines
    assert "model.policy=nobody/has-this: its size is not known on this machine" in lines


def test_cpus_need_no_estimate() -> None:
    _, lines = check(file="tiny")
    assert lines[0] == "learner: 2 ranks on CPUs -> 1 pod; a pod has 1 CPU and 3 GiB for them"
    assert "no estimate of GPU memory" in lines


def test_the_columns_of_a_row_add_up_to_its_total() -> None:
    groups = ["objective.advantages=group", "rollout.samples_per_prompt=4"]
    _, lines = check(*GOOD, *groups, "learner.share_prompts=true")
    header = next(number for number, line in enumerate(lines) if line.split()[:1] == ["weights"])
    assert "shared_keys" in lines[header]
    rows = [line.split() for line in lines[header + 1 :]]
    learner = next(row for row in rows if row[0] == "learner")
    *parts, total = (float(cell) for cell in learner[1:] if cell != "-")
    assert sum(parts) == pytest.approx(total, abs=0.5)


@pytest.mark.parametrize(
    ("overrides", "gpu", "words"),
    [
        (["learner.workers=2"], "A100-80GB", "learner: about 249 GiB on a GPU of 80; lower learner.tokens"),
        ([], "A100-40GB", "set learner.gradient_checkpointing=true"),
        (["rollout.max_model_len=900000"], "H200", "rollout: no sequence fits beside the weights; raise"),
    ],
)
def test_what_cannot_work_is_a_problem(overrides: list[str], gpu: str, words: str) -> None:
    problems, _ = check(*GOOD, "learner.gradient_checkpointing=false", *overrides, gpu=gpu)
    assert [problem for problem in problems if words in problem], problems


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "rollout.labels={}",
            "rollout.labels is empty: its workers may land on pods of learner, reward; add "
            "rollout.labels.rl/role=rollout",
        ),
        ("learner.labels={rl/role: reward}", "learner.labels is {'rl/role': 'reward'}: its workers may land on"),
        ("learner.workers=13", "learner.workers is 13, which no number from 2 to 8 divides"),
        ("cluster.placement_timeout_s=60", "cluster.placement_timeout_s is 60: pods that an autoscaler adds"),
        ("data.path=no/such.jsonl", "data.path is no/such.jsonl: pods see /mnt/t2g"),
        ("data.path=[/mnt/t2g/a.jsonl,no/b.jsonl]", "data.path is no/b.jsonl: pods see /mnt/t2g"),
        ("feedback.reward_model=runs/slf5k-reward/model", "feedback.reward_model is runs/slf5k-reward/model"),
        ("model.policy=/home/me/model", "model.policy is /home/me/model"),
        ("rollout.dtype=float32", "rollout.dtype is float32, for which GPUs have no fast attention"),
    ],
)
def test_what_goes_wrong_on_pods_is_a_warning(override: str, words: str) -> None:
    _, lines = check(*GOOD, override)
    assert [warning for warning in warnings(lines) if words in warning], lines


def test_paths_are_judged_by_the_mount_that_render_makes() -> None:
    _, lines = check(*GOOD, "run.root=/data/runs", "data.path=[/data/a.jsonl,/mnt/t2g/b.jsonl]")
    named = [warning for warning in warnings(lines) if "data.path" in warning]
    assert [warning.partition(": ")[0] for warning in named] == ["data.path is /mnt/t2g/b.jsonl"]
    assert "pods see /data " in named[0]
    _, lines = check(*GOOD, "run.root=/root/runs")
    assert any("run.root=/root/runs: the volume would be mounted" in warning for warning in warnings(lines))


def test_the_object_store_is_sized_by_the_weights_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def store_warnings(*overrides: str) -> list[str]:
        return [warning for warning in warnings(check(*GOOD, *overrides)[1]) if "object_store_gib" in warning]

    store = "learner.sync_transport=store"
    (words,) = store_warnings(store, "cluster.object_store_gib=4")
    assert "object_store_gib is 4: the policy's weights, held for late engines, take 15" in words
    assert (
        store_warnings(store, "cluster.object_store_gib=null") == store_warnings("cluster.object_store_gib=4") == []
    ), "nccl holds none"
    path = ROOT / "configs/slf5k/policy.yaml"
    for transport, size in (("store", 1.2 * 2 * 8_030_261_248 / 2**30), ("nccl", 1.0)):
        job = loading.load(PolicyJob, path, [f"learner.sync_transport={transport}"], environ={}, cwd=ROOT)
        assert store_gib(job) == pytest.approx(size)


@pytest.mark.parametrize("gpu", ["L4", "A100-80GB"])
def test_an_engine_and_a_rank_fit_on_one_gpu(gpu: str) -> None:
    path = ROOT / "configs/own/one_gpu.yaml"

    def problems(*overrides: str) -> list[str]:
        return check_config(loading.load(PolicyJob, path, overrides, environ={}, cwd=ROOT), gpu=gpu)[0]

    assert problems() == []
    assert "in all: 1 GPU," in check_config(loading.load(PolicyJob, path, environ={}, cwd=ROOT), gpu=gpu)[1]
    memory_problems = problems("learner.lora=null")  # all weights train: 23 GiB of gradients and optimizer
    assert bool(memory_problems) is (gpu == "L4")
    if memory_problems:
        rank, engine = memory_problems
        assert engine.startswith("rollout.gpu_memory_utilization is 0.27, and the rank on the same GPU leaves ")
        assert " GiB on a GPU of 22.5 beside 6 of the engine there" in rank


def test_a_rank_with_a_part_of_a_gpu_has_that_part_of_its_memory() -> None:
    half = ("learner.workers=1", "learner.gpus=0.5", "rollout.gpus=0.5", "learner.lora={r: 16, alpha: 32}",
            "objective.advantages=group", "rollout.samples_per_prompt=4")  # fmt: skip
    problems, _ = check(*GOOD, *half, gpu="A100-40GB")
    assert [problem for problem in problems if "GiB on 0.5 of a GPU of 40" in problem], problems
    assert check(*GOOD, *half, gpu="H200")[0] == []


def test_engine_and_rank_leave_two_gib_of_a_card_of_24() -> None:
    """Of the 22.5 GiB that the driver shows of an L4; the engine fills its share with cache."""
    config = loading.load(PolicyJob, ROOT / "configs/own/one_gpu.yaml", environ={}, cwd=ROOT)
    row = next(line.split() for line in check_config(config, gpu="L4")[1].splitlines() if line.startswith("  learner"))
    assert 22.5 - float(row[-1]) - config.rollout.gpu_memory_utilization * 22.5 >= 2


def test_time_shared_engines_and_ranks_are_counted_once_and_fit_by_halves() -> None:
    turns = (*GOOD, "cluster.gpu_sharing=alternate", "rollout.workers={min: 8, max: 8}", "learner.workers=8",
             "rollout.labels.rl/role=learner", "rollout.max_staleness=0",
             "rollout.gpu_memory_utilization=0.8")  # fmt: skip
    problems, lines = check(*turns)
    assert problems == [] and "in all: 9 GPUs, and a head without workers" in lines, (
        "eight, and one of the reward model"
    )
    (wake,) = check(*turns, "rollout.gpu_memory_utilization=0.85")[0]
    # 5.5 GiB of weights; four times the embedding of .98, two lent and two to gather it; 3 of all else
    assert wake.startswith("rollout.gpu_memory_utilization is 0.85, and the rank on the same GPU leaves 0.84")
    (asleep,) = check(*turns, "rollout.memory_gib=12")[0]
    assert "weights of an engine that sleeps need 15" in asleep
    (rank,) = check(*turns, "learner.workers=1", "rollout.workers=1")[0][:1]
    assert "beside 3 of the engine there" in rank


def test_an_unknown_gpu_is_refused() -> None:
    for wrong in ("H1000", "0", "nan", "-80"):
        with pytest.raises(UserError, match=f"--gpu: got '{wrong}', but needs one of .*, or GiB as a number"):
            check(gpu=wrong)
    assert check(*GOOD, gpu="80")[0] == []
    assert "of 80 (80):" in "\n".join(check(*GOOD, gpu="80")[1])


def test_a_machine_without_a_sandbox_is_warned_of_where_the_task_is_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t2g.deploy.check.find_refusal", lambda require: f"no {', '.join(require)}")
    assert "on this machine no processes, files, network" in warnings(check(file="kodcode")[1])
    assert not any("on this machine" in line for line in warnings(check()[1]))


def test_one_machine_gets_no_warning_about_pods_and_advice_that_its_sharing_allows() -> None:
    shared = ["cluster.gpu_sharing=alternate", "rollout.gpus=1", "learner.gpus=1", "learner.lora=null"]
    model = "model.policy=meta-llama/Llama-3.1-8B-Instruct"
    job = loading.load(PolicyJob, ROOT / "configs/own/one_gpu.yaml", [*shared, model], environ={}, cwd=ROOT)
    problems, report = check_config(job, gpu="L4")
    assert not [line for line in warnings(report.splitlines()) if "pods" in line]
    (learner,) = [problem for problem in problems if problem.startswith("learner: ")]
    assert "learner.lora" in learner
    assert "offload" not in learner
    assert "workers" not in learner


def test_an_engine_with_too_little_room_for_its_sequences_is_a_warning() -> None:
    _, lines = check(*GOOD, "rollout.max_model_len=16384", gpu="A100-40GB")
    (room,) = [line for line in lines if line.startswith("rollout: an engine must hold")]
    num_sequences, fitting = (int(number) for number in (room.split()[5], room.split("room for ")[1].split()[0]))
    assert fitting < num_sequences
    assert [warning for warning in warnings(lines) if f"room for {fitting} of its {num_sequences}" in warning]
