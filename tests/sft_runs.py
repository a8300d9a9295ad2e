"""A tiny supervised training that ends in memory: eight prompts, eight targets, a random Llama."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.learner.sft import run_sft
from actors.learner.sft_rank import CHECKPOINTS, SFTProgress
from t2g.config import ClusterConfig, ModelConfig, OptimConfig, SFTOptions
from t2g.feedback.examples import make_sft_example
from t2g.runs.identity import Identity
from t2g.tasks.tiny.assets import build_model, build_tokenizer
from t2g.types import TrainSequence

TARGETS = ["red fox", "blue whale", "東京 tower", "café noir", "green tea 🍵", "grey owl", "pink crab", "lime"]
MEMORISED = 0.05  # nats per target token; an untrained model has ln(vocabulary) = 5.6


def make_base(folder: Path, *, initializer_range: float = 0.08) -> Path:
    """Random weights. Where the head stays frozen a spread of 0.08 leaves 1.2 nats: it cannot say more."""
    tokenizer = build_tokenizer(folder, TARGETS, vocab_size=280)
    build_model(
        folder, tokenizer, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=64, initializer_range=initializer_range,
    )  # fmt: skip
    return folder


def make_examples(base: Path) -> list[TrainSequence]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = [np.asarray(tokenizer(f"number {i}:")["input_ids"]) for i in range(len(TARGETS))]
    return [
        make_sft_example(lambda room, ids=ids: ids, text, tokenizer, max_length=64)
        for ids, text in zip(prompts, TARGETS, strict=True)
    ]


def make_options(**changes: Any) -> SFTOptions:
    """All 8 examples in each of 40 steps; three rows a microbatch, so that ranks and microbatches are uneven."""
    fields = {
        "optim": OptimConfig(lr=5e-3, schedule="constant", betas=(0.9, 0.98)),
        "num_epochs": 40, "batch_size": 8, "tokens_per_microbatch": 64, "memory_gib": 0.5, "cpus": 0.5,
        "timeout_s": 400,
    }  # fmt: skip
    return SFTOptions(**{**fields, **changes})


def train(
    base: Path,
    out_folder: Path,
    cluster: ClusterConfig,
    on_start: Callable[[int], None] = lambda done: None,
    *,
    seen: list[SFTProgress] | None = None,
    on_step: Callable[[int], None] = lambda done: None,
    **changes: Any,
) -> tuple[dict[str, float], list[SFTProgress]]:
    """Metrics and reports; `seen` has the reports of a training that fails as well."""
    seen = [] if seen is None else seen

    def on_report(step: int, progress: SFTProgress | None) -> None:
        on_step(step)
        if progress:
            seen.append(progress)

    options = make_options(**changes)
    model = ModelConfig(policy=str(base))
    metrics = run_sft(
        model=model, examples=make_examples(base), options=options, cluster=cluster, out_folder=out_folder, seed=3,
        run_identity=Identity.from_config(options, model=str(base)), on_start=on_start, on_report=on_report,
    )  # fmt: skip
    return metrics, seen


def stand_in_the_way(part: Path, step: int) -> None:
    """Once the checkpoint of `step` stands alone, a file is where the folder was: rank 0 alone dies, at the next."""
    folder = part / CHECKPOINTS
    until = time.monotonic() + 300

    def watch() -> None:
        while [path.name for path in folder.glob("step-*")] != [f"step-{step:08d}"] and time.monotonic() < until:
            time.sleep(0.005)
        folder.rename(part / "away")
        folder.touch()

    threading.Thread(target=watch, daemon=True).start()


def step_aside(part: Path) -> None:
    (part / CHECKPOINTS).unlink()
    (part / "away").rename(part / CHECKPOINTS)


def assert_writes_the_targets(folder: Path) -> None:
    """Greedy, each with its end."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for i, target in enumerate(TARGETS):
        prompt = tokenizer(f"number {i}:", return_tensors="pt")
        written = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(written[:-1]) == target
        assert written[-1] == tokenizer.eos_token_id
