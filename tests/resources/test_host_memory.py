"""Memory of processes on CPUs: against the peaks of real ranks, and what a job does with the estimate."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.fanout import is_short_of_memory
from actors.learner import ranks
from actors.learner.ranks import Ranks, rank_environment
from t2g.config import EngineConfig, LearnerConfig, ObjectiveConfig, PolicyJob, RewardJob, RolloutConfig, loading
from t2g.errors import LearnerLost
from t2g.resources.host_memory import (
    advise,
    eager_activation_bytes,
    engine_bytes,
    learner_parts,
)
from t2g.resources.job_memory import estimate_roles, with_estimated_memory
from t2g.resources.memory import BYTES, GIB, shared_keys_bytes
from t2g.resources.model_shape import ModelShape

TESTS = Path(__file__).parents[1]
SHAPES = {  # of SmolLM2-135M, and of a smaller model with a head of its own
    "135M": ModelShape(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True,
    ),
    "44M": ModelShape(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, num_key_value_heads=3,
        intermediate_size=1024, vocab_size=32000,
    ),
}  # fmt: skip


BFLOAT16 = {"dtype": "bfloat16"}


def estimate(name: str, learner: LearnerConfig, row: int) -> float:
    """Estimate a rank as rank_memory.py measures it: a sequence is half prompt, a shared prompt fills a microbatch."""
    half = row // 2
    number = max(1, learner.tokens_per_microbatch // half - 1)
    rollout = RolloutConfig(samples_per_prompt=number, max_model_len=row, max_new_tokens=half)
    shape = SHAPES[name]
    tokens = learner.tokens_per_microbatch
    keys = shared_keys_bytes(shape, learner, rollout, tokens=tokens, itemsize=BYTES[learner.dtype])
    return sum(learner_parts(shape, learner, ObjectiveConfig(), row, shared_keys=keys).values()) / GIB


def write_config(folder: Path, shape: ModelShape) -> Path:
    """Write a model folder without weights, with the tokenizer of the tests."""
    from t2g.tasks.tiny.assets import build_tokenizer

    build_tokenizer(folder, ["x"], vocab_size=300)
    values = shape.model_dump(
        exclude={"logits_scaling", "logit_scale", "final_logit_softcapping", "quantization_config"}
    )
    architecture = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({**values, **architecture, "model_type": "llama"}))
    return folder


def policy_job(tmp_path: Path, shape: ModelShape, *overrides: str) -> PolicyJob:
    """The config that `t2g init` writes, with a model of this shape."""
    starter = TESTS.parent / "jobs" / "starter" / "policy.yaml"
    model = write_config(tmp_path / "model", shape)
    return loading.load(PolicyJob, starter, [f"model.policy={model}", f"run.root={tmp_path}", *overrides])


# Peaks of ranks, GiB, on two AMD EPYC cores on 27 November 2026, with shared prompts on the 28th, by rank_memory.py.
@pytest.mark.parametrize(
    ("name", "options", "row", "peak"),
    [
        ("135M", {"tokens_per_microbatch": 512, "lora": {"r": 16}}, 512, 3.41),
        ("135M", {"tokens_per_microbatch": 512}, 512, 5.75),
        ("44M", {"tokens_per_microbatch": 2048}, 512, 3.88),
        ("44M", {"tokens_per_microbatch": 1024, "gradient_checkpointing": True}, 256, 2.67),
        ("135M", {"tokens_per_microbatch": 1280, "lora": {"r": 16}, "share_prompts": True}, 512, 6.32),
        ("135M", {"tokens_per_microbatch": 1280, "lora": {"r": 16}, "share_prompts": True} | BFLOAT16, 512, 3.68),
    ],
)
def test_the_estimate_is_within_a_quarter_of_a_real_ranks_peak(
    name: str, options: dict[str, Any], row: int, peak: float
) -> None:
    assert estimate(name, LearnerConfig(**options), row) == pytest.approx(peak, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "row"),
    [
        ("44M", {"tokens_per_microbatch": 2048}, 512),
        ("135M", {"tokens_per_microbatch": 512}, 512),
        ("44M", {"tokens_per_microbatch": 1024, "gradient_checkpointing": True}, 256),
    ],
)
def test_the_estimate_against_a_rank_of_this_machine(
    tmp_path: Path, name: str, options: dict[str, Any], row: int
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = write_config(tmp_path / "model", SHAPES[name])
    LlamaForCausalLM(LlamaConfig.from_pretrained(model)).save_pretrained(model)
    environment = {**os.environ, **rank_environment(LearnerConfig()), "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(TESTS / "rank_memory.py"), str(model), json.dumps(options), str(row)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    peak = float(ended.stdout.split()[-1])
    assert estimate(name, LearnerConfig(**options), row) == pytest.approx(peak, rel=0.25)


def test_the_estimate_of_an_engine_is_within_a_quarter_of_the_starters() -> None:
    assert engine_bytes(SHAPES["135M"], EngineConfig()) / GIB == pytest.approx(2.37 + 1.57, rel=0.25)


def test_attention_weights_and_checkpointing_by_hand() -> None:
    """One layer of 44M with 100 tokens in rows of 50: h 384, q 384, kv 192, i 1024, 6 heads, float32."""
    layer = 24 * 384 + 16 * 384 + 16 * 1024 + 4 * 6 * 50
    shape = SHAPES["44M"].model_copy(update={"num_hidden_layers": 3})
    assert eager_activation_bytes(shape, 100, 50, itemsize=4, checkpointing=False) == 100 * 3 * layer
    assert eager_activation_bytes(shape, 100, 50, itemsize=4, checkpointing=True) == 100 * (3 * 4 * 384 + 2 * layer)


def test_what_lowers_the_memory_of_a_rank() -> None:
    full = estimate("135M", LearnerConfig(), 512)
    assert full > 10
    assert estimate("135M", LearnerConfig(tokens_per_microbatch=512), 512) < 0.6 * full
    assert estimate("135M", LearnerConfig(gradient_checkpointing=True), 512) < 0.6 * full
    assert estimate("135M", LearnerConfig(lora={"r": 16}), 512) < full - 2
    assert estimate("135M", LearnerConfig(share_prompts=True), 512) < full - 1  # it saves no attention weights
    halves = estimate("135M", LearnerConfig(tokens_per_microbatch=512, workers=2), 512)
    assert halves < estimate("135M", LearnerConfig(tokens_per_microbatch=512), 512) - 1


def test_a_job_promises_the_estimate_and_not_a_constant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = with_estimated_memory(policy_job(tmp_path, SHAPES["135M"]))
    sizes = {name: size / GIB for name, size in estimate_roles(job).items()}
    assert {name: role.memory_gib for name, role in job.roles().items()} == pytest.approx(sizes, abs=0.051)
    assert f"about {job.learner.memory_gib:g} GiB" in job.describe()
    assert sum(sizes.values()) < 8, "the starter fits a machine of 8 GiB"
    assert "memory_gib" not in caplog.text
    set_by_user = policy_job(tmp_path, SHAPES["135M"], "learner.memory_gib=2")
    assert with_estimated_memory(set_by_user).learner.memory_gib == 2
    assert "learner.memory_gib is 2, and a process needs about" in caplog.text
    advice = "raise it, lower learner.tokens_per_microbatch (512) or set learner.gradient_checkpointing=true"
    assert advice in caplog.text
    caplog.clear()
    with_estimated_memory(policy_job(tmp_path, SHAPES["135M"], "rollout.memory_gib=1"))
    assert "rollout.memory_gib is 1, and" in caplog.text
    assert "learner." not in caplog.text, "an engine needs no other microbatch"
    on_gpus = policy_job(tmp_path, SHAPES["135M"], "learner.gpus=1", "rollout.gpus=1")
    assert with_estimated_memory(on_gpus) == on_gpus


def test_critic_ranks_share_their_own_number_and_have_no_head(tmp_path: Path) -> None:
    def critic_bytes(workers: int, critic_workers: int) -> float:
        section = "learner.critic_ranks"
        overrides = [
            f"learner.workers={workers}",
            "objective.advantages=gae",
            f"{section}={{workers: {critic_workers}}}",
        ]
        return estimate_roles(policy_job(tmp_path, SHAPES["135M"], *overrides))[section]

    assert critic_bytes(1, 1) == critic_bytes(4, 1)
    states = critic_bytes(1, 1) - critic_bytes(1, 2)
    numel = SHAPES["135M"].backbone_numel
    assert states == pytest.approx((4 + 4 + 12) * numel / 2)


def test_supervised_training_has_an_estimate_too(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", SHAPES["135M"])
    values = {"model": {"policy": str(model)}, "data": {"path": "a.jsonl"}, "eval_data": {"path": "b.jsonl"}}
    job = with_estimated_memory(RewardJob.model_validate(values))
    assert 5 < job.sft.memory_gib < 14


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("The process is killed by SIGKILL by OOM killer due to high memory usage."), True),
        (RuntimeError("Task was killed due to the node running low on memory."), True),
        (MemoryError(), True),
        (RuntimeError("The actor is dead because it was killed by `ray.kill`."), False),
    ],
)
def test_an_error_of_a_process_that_was_short_of_memory(error: Exception, expected: bool) -> None:
    outer = ValueError("learner rank 0 died")
    outer.__cause__ = error
    assert is_short_of_memory(outer) is is_short_of_memory(error) is expected


def test_a_lost_rank_that_was_short_of_memory_says_what_lowers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ended for another reason says nothing of memory."""
    group = Ranks.__new__(Ranks)
    group.actor_name = "learner rank"
    group._memory_advice = advise("learner", LearnerConfig())
    group._limit_s = None
    group.workers = []
    killed = RuntimeError("The actor died: the process was killed by the OOM killer due to high memory usage")

    def collect_from(cause: Exception) -> str:
        def fail(*_: Any, **options: Any) -> None:
            raise LearnerLost(f"{options['actor_name']} 0 died during update") from cause

        monkeypatch.setattr(ranks, "collect", fail)
        with pytest.raises(LearnerLost) as caught:
            group.collect([], "update", 0.0)
        return str(caught.value)

    assert collect_from(killed) == (
        "learner rank 0 died during update; if it was short of memory, lower learner.tokens_per_microbatch (4096) or "
        "set learner.gradient_checkpointing=true"
    )
    assert collect_from(RuntimeError("killed by ray.kill")) == "learner rank 0 died during update"


def test_the_advice_names_what_is_left() -> None:
    assert advise("sft", LearnerConfig(gradient_checkpointing=True)) == "lower sft.tokens_per_microbatch (4096)"
