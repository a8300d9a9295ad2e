"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290) by TRL, in one process of its own.

TRL is the extra `baselines`, imported in that process only. What it is not: sharded. The whole model and its optimizer
lie in one process, with adapters where `learner.lora` asks for them.
"""

import time
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group

from actors.cluster import placement
from actors.cluster.fanout import collect
from actors.learner import lora
from actors.learner.models import checkpoint_layers, load_for_training
from actors.learner.zero3 import lr_factor
from t2g.config import ClusterConfig, LearnerConfig, ModelConfig, with_overrides
from t2g.errors import RunStopped
from t2g.study.baselines import PreferencePair

BETA = 0.1  # the paper's, and TRL's default
LABEL = "DPO"
POLL_S = 0.5
REPORTED = {"loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "grad_norm": "grad_norm"}


def fit_dpo(
    model: ModelConfig,
    learner: LearnerConfig,
    pairs: Sequence[PreferencePair],
    *,
    batch_size: int,
    seed: int,
    out_folder: Path,
    on_step: Callable[[int], None],
) -> dict[str, float]:
    """Train `model` on `pairs` in this process and write it, merged, to the new `out_folder` with its tokenizer.

    Log-probabilities are those of softmax(logits), as in the paper, at whatever temperature the pairs were sampled.

    Args:
        batch_size: pairs of one optimizer step; microbatches hold about `learner.tokens_per_microbatch` tokens.
        on_step: called with the number of optimizer steps that are done.

    Returns loss, accuracy (pairs whose chosen response gained more than the rejected one), margin (of beta times the
    gains, nats) and grad_norm of the last step, and steps.

    Raises RunStopped when the loss or the gradient of a step was not finite.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # TRL would encode texts: the sampled ids are what the delta was measured on

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            on_step(state.global_step)

    torch.set_num_threads(learner.threads)
    on_gpu = learner.gpus > 0
    tokenizer, (policy,) = load_for_training(model, "AutoModelForCausalLM", dtype="float32", on_gpu=on_gpu)
    tokenizer.save_pretrained(out_folder)  # before TRL gives it a padding token
    if learner.lora is not None:
        lora.add_adapters(policy, learner.lora, model, dropout=0.0)
    if learner.gradient_checkpointing:
        checkpoint_layers(policy, model, section="learner")
    rows = [{name: ids.tolist() for name, ids in vars(pair).items()} for pair in pairs]
    micro, accumulate = split_batch(pairs, batch_size, learner.tokens_per_microbatch)
    num_steps = ceil(ceil(len(rows) / micro) / accumulate) * learner.num_epochs
    optim = learner.policy
    trainable = [p for p in policy.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trainable, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: lr_factor(step, optim, num_steps))
    with TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=policy,
            args=DPOConfig(
                output_dir=scratch, beta=BETA, seed=seed, use_cpu=not on_gpu, bf16=learner.dtype == "bfloat16",
                per_device_train_batch_size=micro, gradient_accumulation_steps=accumulate,
                num_train_epochs=learner.num_epochs, max_grad_norm=optim.max_grad_norm, max_length=None,
                gradient_checkpointing=learner.gradient_checkpointing,
                gradient_checkpointing_kwargs={"use_reentrant": False},
                precompute_ref_log_probs=True,  # by the model as it is now: no second copy
                logging_steps=1, logging_nan_inf_filter=False, report_to="none", save_strategy="no",
                disable_tqdm=True, dataloader_pin_memory=on_gpu,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Steps()],
            optimizers=(adamw, schedule),
        )  # fmt: skip
        trainer.train()
    lines = (line for line in trainer.state.log_history if "loss" in line)
    logged = [{ours: line[name] for name, ours in REPORTED.items()} for line in lines]
    _refuse_not_finite(logged)
    _export(policy, learner, out_folder)
    return logged[-1] | {"steps": float(trainer.state.global_step)}


def split_batch(pairs: Sequence[PreferencePair], batch_size: int, token_budget: int) -> tuple[int, int]:
    """Pairs of a microbatch, and microbatches of an optimizer step: their product is `batch_size` or a little more.

    A pair is two rows, padded to the longest of their microbatch. 48 pairs of at most 40 tokens a row, 1,000 tokens
    a microbatch: 12 pairs fit -> (12, 4).
    """
    longest = max(len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs)
    accumulate = ceil(batch_size / max(1, token_budget // (2 * longest)))
    return ceil(batch_size / accumulate), accumulate


def _refuse_not_finite(logged: Sequence[dict[str, float]]) -> None:
    for step, values in enumerate(logged, start=1):
        for name in ("loss", "grad_norm"):
            if not torch.isfinite(torch.tensor(values[name])):
                raise RunStopped(f"{LABEL}, step {step}: the {name} is {values[name]}; lower learner.policy.lr")


def _export(policy: Any, learner: LearnerConfig, folder: Path) -> None:
    """In `learner.dtype`, adapters merged."""
    named = dict(policy.named_parameters())
    dtype = getattr(torch, learner.dtype)
    state = {
        name: lora.checkpoint_weight(policy, name, (named[part].cpu() for part in parts)).to(dtype).contiguous()
        for name, parts in lora.sources(named).items()
    }
    policy.save_pretrained(folder, state_dict=state)


class DPOWorker:
    """`done` answers while `train` runs."""

    def __init__(self) -> None:
        self._done = 0

    def done(self) -> int:
        """Optimizer steps so far."""
        return self._done

    def train(self, *args: Any, **settings: Any) -> dict[str, float]:
        """As `fit_dpo`."""

        def on_step(step: int) -> None:
            self._done = step

        return fit_dpo(*args, on_step=on_step, **settings)


def train_dpo(
    model: ModelConfig,
    learner: LearnerConfig,
    pairs: Sequence[PreferencePair],
    *,
    cluster: ClusterConfig,
    stop: Callable[[], bool],
    on_progress: Callable[[int], None],
    **settings: Any,
) -> dict[str, float] | None:
    """`fit_dpo` with `settings` in a process with the resources of one learner rank; None when `stop()` ended it.

    on_progress: called with the number of steps that are done, when it has changed.
    Raises UserError when there is no place for it, RunStopped when no step comes within `learner.step_timeout_s`.
    """
    role = with_overrides(learner, {"workers": 1})
    (group,) = placement.reserve({"learner": role}, timeout_s=cluster.placement_timeout_s)
    worker = DPOActor.options(max_concurrency=2, **placement.actor_options(role, group)).remote()
    try:
        answer = worker.train.remote(model, learner, list(pairs), **settings)
        done, heard = 0, time.monotonic()
        while not ray.wait([answer], timeout=POLL_S)[0]:
            if stop():
                return None
            if (now := _ask(worker)) is not None and now > done:
                done, heard = now, time.monotonic()
                on_progress(done)
            if time.monotonic() - heard > learner.step_timeout_s:
                raise RunStopped(
                    f"{LABEL} is late: no optimizer step for {learner.step_timeout_s:g} s after step {done}; raise "
                    "learner.step_timeout_s"
                )
        (metrics,) = collect([answer], who=LABEL, call="training", timeout_s=POLL_S)
        return metrics
    finally:
        ray.kill(worker, no_restart=True)
        remove_placement_group(group)


def _ask(worker: Any) -> int | None:
    try:
        return ray.get(worker.done.remote(), timeout=POLL_S)
    except RayError:  # late while it imports or loads the model; of a death its answer tells
        return None


DPOActor = ray.remote(DPOWorker)
