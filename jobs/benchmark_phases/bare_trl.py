"""GRPO of TRL with Hugging Face's own `generate`, or with vLLM in its own process: one step per call."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from actors.engines.engine import engine_environment
from t2g.config import BenchmarkJob

IN_PROCESS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
# What torchrun would say, and vLLM reads; and one process for its engine and core, as `bare.BareEngine` has.
ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


def settings_of(config: BenchmarkJob, folder: Path) -> dict[str, Any]:
    """Return the arguments of TRL's config for the same step."""
    rollout = config.rollout
    optim = config.learner.policy
    batch_size = rollout.prompts_per_step * rollout.samples_per_prompt
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not config.learner.gpus,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": 10_000,
    }
    settings |= {
        "per_device_train_batch_size": batch_size,
        "num_generations": rollout.samples_per_prompt,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "beta": 0.05,
        "num_iterations": 1,
    }
    settings |= {
        "learning_rate": optim.lr,
        "max_grad_norm": optim.max_grad_norm,
        "optim": "adamw_torch_fused",
        "seed": config.run.seed,
    }
    return settings


def count_letters(completions: list[str], **_: Any) -> list[float]:
    """Reward each "a", like the feedback of our side."""
    return [float(text.count("a")) for text in completions]


class Grpo:
    """TRL's trainer; each call makes one step."""

    def __init__(self, model: str, texts: list[str], config: BenchmarkJob, *, vllm: bool = False) -> None:
        import torch

        torch.set_num_threads(config.learner.threads)
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._generate_s = 0.0
        self._tokens = 0
        self._error = ""
        self._trainer = self._make_trainer(model, texts, config, IN_PROCESS if vllm else {})
        self._thread: threading.Thread | None = None

    def step(self, timeout_s: float) -> tuple[int, dict[str, float]]:
        """Make one step; return the number of response tokens and the times of its phases."""
        self._generate_s = 0.0
        self._tokens = 0
        started = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        if not self._done.acquire(timeout=timeout_s):
            raise TimeoutError("a step of TRL")
        if self._error:
            raise RuntimeError(self._error)
        update_s = time.monotonic() - started - self._generate_s
        return self._tokens, {"generate_s": self._generate_s, "learn_s": update_s}

    def _run(self) -> None:
        try:
            self._go.acquire()
            self._trainer.train()
        except Exception as error:  # noqa: BLE001 - the caller that waits for the step raises it
            self._error = f"{type(error).__name__}: {error}"
            self._done.release()

    def _make_trainer(self, model: str, texts: list[str], config: BenchmarkJob, vllm: dict[str, Any]) -> Any:
        import torch
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        rollout = config.rollout
        go = self._go
        done = self._done
        if vllm:
            os.environ.update(ALONE | engine_environment(rollout, owner=os.getpid(), receives_weights=False))
            from vllm.utils.network_utils import get_open_port

            os.environ["MASTER_PORT"] = str(get_open_port())

        class Pace(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                done.release()
                go.acquire()

        settings = GRPOConfig(**settings_of(config, Path(model).parent / "trl"), **vllm)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, config.learner.dtype))
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        trainer = GRPOTrainer(
            policy,
            reward_funcs=count_letters,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[Pace()],
        )
        if vllm and not config.learner.gpus:
            trainer.vllm_generation.sync_weights = lambda: None  # vLLM's packed matrices of a CPU take no others
        generate = trainer._generate_single_turn

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            generated = generate(*args, **kwargs)
            self._generate_s += time.monotonic() - started
            self._tokens += sum(len(ids) for ids in generated[0])
            return generated

        trainer._generate_single_turn = timed
        return trainer
