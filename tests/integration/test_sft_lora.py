"""What real models need, on the real stack: adapters, gradient checkpointing, offload, bfloat16."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from heads import free_port
from peft import PeftModel
from safetensors.torch import load_file
from sft_runs import (
    MEMORISED,
    assert_writes_the_targets,
    make_base,
    make_examples,
    stand_in_the_way,
    step_aside,
    train,
)
from transformers import AutoModelForCausalLM

from t2g.config import ClusterConfig, LoRAConfig, ModelConfig, OptimConfig, SFTLoRAConfig
from t2g.errors import RunStopped

pytestmark = pytest.mark.slow  # three trainings of adapters; test_sft and test_learner_lora have the halves

LR = 1e-2
FILES = ("model.safetensors", "adapter/adapter_model.safetensors")
OTHER_ORDER = 1e-3  # after ten steps; host memory sums the norm that clips in another order, which 40 steps make .08 of
OPTIONS: dict[str, Any] = {
    "lora": SFTLoRAConfig(r=32, alpha=64, dropout=0.05),
    "workers": 2,
    "optim": OptimConfig(lr=LR, schedule="cosine", warmup_ratio=0.25, betas=(0.9, 0.98)),
}


@pytest.fixture(scope="module")
def cluster(cluster: None) -> ClusterConfig:
    return ClusterConfig()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), initializer_range=0.25)


@pytest.fixture(scope="module")
def trained(base: Path, cluster: ClusterConfig, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder and the reports of a training on two ranks."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    return folder, train(base, folder, cluster, gradient_checkpointing=True, **OPTIONS)[1]


def test_adapters_memorise_and_the_merged_model_writes_the_targets(trained: Any) -> None:
    folder, seen = trained
    assert seen[-1].loss < MEMORISED
    assert_writes_the_targets(folder)


def test_the_rate_rises_for_a_quarter_and_falls_as_a_cosine(trained: Any) -> None:
    """Steps 10, 20, 30, 40 of 40: the end of the warm-up, then (1 + cos(pi * k / 30)) / 2 for k = 9, 19, 29."""
    rates = [progress.lr / LR for progress in trained[1]]
    assert rates == pytest.approx([1, 0.7938926, 0.2966317, 0.0027391], rel=1e-4)


def test_merged_weights_are_base_plus_adapter(trained: Any, base: Path) -> None:
    folder, _ = trained
    merged = load_file(folder / "model.safetensors")
    start = load_file(base / "model.safetensors")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    modules = {name.split(".lora_")[0] for name in adapter}
    assert len(adapter) == 2 * len(modules) == 2 * 2 * 7  # A and B; layers; linear layers in each
    assert merged.keys() == start.keys()
    for name, weight in start.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if module in modules:
            a = adapter[f"{module}.lora_A.weight"]
            b = adapter[f"{module}.lora_B.weight"]
            torch.testing.assert_close(merged[name], weight + 64 / 32 * b @ a, atol=1e-6, rtol=1e-5)
            assert (merged[name] - weight).abs().max() > 1e-2
        else:
            assert torch.equal(merged[name], weight)


def test_peft_reads_the_adapter_and_agrees_with_the_merged_model(trained: Any, base: Path) -> None:
    folder, _ = trained
    ids = torch.arange(60).reshape(2, 30)
    one = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "adapter")
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        torch.testing.assert_close(one(ids).logits, expected, atol=1e-4, rtol=1e-5)  # of logits up to 30


def test_killed_and_resumed_with_other_memory_options_gives_the_same_weights(
    trained: Any, base: Path, cluster: ClusterConfig, tmp_path: Path
) -> None:
    """After a start that died at the checkpoint of step 36: without gradient checkpointing, then in host memory too."""
    part = tmp_path / "model.part"
    done = list[int]()

    def on_start(steps: int) -> None:
        done.append(steps)
        stand_in_the_way(part, 30)

    with pytest.raises(RunStopped, match=r"rank 0: FileExistsError.*checkpoints"):
        train(base, tmp_path / "model", cluster, on_start, checkpoint_every=6, **OPTIONS)
    step_aside(part)
    shutil.copytree(part, tmp_path / "host.part")

    train(base, tmp_path / "model", cluster, done.append, checkpoint_every=6, **OPTIONS)
    train(base, tmp_path / "host", cluster, done.append, checkpoint_every=6, offload="cpu", **OPTIONS)
    assert done == [0, 30, 30]
    assert apart(tmp_path / "model", trained[0]) == 0
    assert apart(tmp_path / "host", trained[0]) < OTHER_ORDER


def apart(one: Path, other: Path) -> float:
    """The largest difference of a weight, merged or of the adapter."""
    pairs = [(load_file(one / file), load_file(other / file)) for file in FILES]
    assert all(a.keys() == b.keys() for a, b in pairs)
    return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in a)


@ray.remote(num_cpus=0.5)
def bfloat16_training(base: str, examples: list[Any], scratch: str) -> dict[str, Any]:
    """Twelve steps with adapters, then the last four once more in a new engine from a checkpoint."""
    from actors.learner import lora, zero3
    from actors.learner.full_weights import FullWeights, get_shapes
    from actors.learner.models import load_for_training
    from t2g.algo.logprobs import Rows
    from t2g.algo.losses import supervised_loss
    from t2g.data.batching import normalize_weights

    zero3.init_distributed(0, 1, "127.0.0.1", free_port(), "gloo", timeout_s=60)
    source = ModelConfig(policy=base)
    folder = Path(scratch)
    rows = Rows(normalize_weights(examples), torch.device("cpu"))

    def loss_fn(engine: Any, rows: Rows) -> tuple[torch.Tensor, dict[str, float]]:
        return supervised_loss(logprobs=rows.token_outputs(engine, 1.0).logprobs, weights=rows.column("weights"))

    def start() -> Any:
        torch.manual_seed(0)
        _, (model,) = load_for_training(source, "AutoModelForCausalLM", dtype="bfloat16", on_gpu=False)
        lora.add_adapters(model, LoRAConfig(r=8, alpha=16), source, dropout=0)
        optim = OptimConfig(lr=LR, schedule="constant")
        return zero3.build_engine(model, optim, num_steps=12, dtype="bfloat16", world_size=1)

    def steps(engine: Any, number: int) -> list[float]:
        return [zero3.train_step(engine, [rows], loss_fn, label="drill").metrics["policy/loss"] for _ in range(number)]

    def weights(engine: Any) -> dict[str, torch.Tensor]:
        buckets = FullWeights(engine).buckets(1 << 16, "bfloat16")
        return {name: weight.clone() for bucket in buckets for name, weight in bucket}

    engine = start()
    losses = steps(engine, 8)
    zero3.save_checkpoint(engine, folder, "drill")
    losses += steps(engine, 4)
    again = start()
    zero3.load_checkpoint(again, folder, "drill")
    steps(again, 4)
    resumed = weights(again)
    moments = [state["exp_avg"] for state in engine.optimizer.optimizer.state.values()]
    (states,) = folder.rglob("*model_states.pt")
    saved_names = set(torch.load(states, weights_only=False)["module"])
    final = weights(engine)
    num_moments = sum(moment.numel() for moment in moments)
    dtypes = {moment.dtype for moment in moments}
    sent = [(name, tuple(weight.shape)) for name, weight in final.items()]
    is_same = all(torch.equal(weight, resumed[name]) for name, weight in final.items())
    return {
        "losses": losses,
        "kept": saved_names,
        "moments": num_moments,
        "dtypes": dtypes,
        "announced": [*get_shapes(engine).items()],
        "sent": sent,
        "same": is_same,
    }


def test_bfloat16_adapters_have_float32_state_and_resume(base: Path, cluster: ClusterConfig, tmp_path: Path) -> None:
    result = ray.get(bfloat16_training.remote(str(base), make_examples(base), str(tmp_path)), timeout=120)
    assert result["losses"][0] > 2 * result["losses"][-1]
    # r * (in + out) of four 64 x 64 matrices and three of 64 x 128 in each of two layers, and nothing of the base
    assert result["moments"] == 2 * 8 * (4 * (64 + 64) + 3 * (64 + 128))
    assert result["dtypes"] == {torch.float32}
    assert result["same"]
    assert len(result["kept"]) == 2 * 2 * 7
    assert all(".lora_" in name for name in result["kept"])
    start = load_file(base / "model.safetensors")
    assert result["announced"] == result["sent"]
    assert dict(result["sent"]) == {name: tuple(weight.shape) for name, weight in start.items()}
