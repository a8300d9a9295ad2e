"""One rank of supervised training: weighted cross-entropy on the targets, a ZeRO-3 engine, a Hugging Face folder out.

Runs inside a Ray Train worker; `sft` starts it, `t2g.feedback.examples` plans the batches, `zero3` is DeepSpeed.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

from actors.learner import lora
from actors.learner.models import checkpoint_layers, load_for_training
from t2g.config import ModelConfig, SFTOptions
from t2g.data.batching import EMPTY_TOKENS
from t2g.errors import UserError
from t2g.feedback.examples import SFTExample, SFTMicrobatch, make_microbatch, plan_epochs
from t2g.runs.checkpoint import CheckpointStore

LABEL = "supervised training"  # how messages call it
REPORT_EVERY = 10  # optimizer steps between two reports
CHECKPOINTS = "checkpoints"  # folder in the unfinished model's
TAG = "engine"  # DeepSpeed's folder in a checkpoint
# What rounding may come to, as a share of the logits' deviation: 0 in most models, 5e-7 where experts share a row.
LEAK = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@dataclass(frozen=True, kw_only=True)
class SFTProgress:
    """Where training stands; loss, gradient norm and speed are means over the steps since the last report."""

    step: int  # optimizer steps done
    num_steps: int
    loss: float  # nats per unit of target weight
    grad_norm: float  # global, before clipping
    lr: float
    tokens_per_s: float  # prompt and target tokens of all ranks, padding not counted
    train_s: float  # since the ranks began to train, in this start
    left_s: float  # at the present speed


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What a rank needs to know."""

    model: ModelConfig
    examples: ray.ObjectRef  # list[SFTExample]
    options: SFTOptions
    out_folder: str
    seed: int
    identity: dict[str, Any]  # goes into each checkpoint: what a later start must share to go on from it
    checkpoint: str | None  # folder to go on from
    done: int  # steps behind it


def train_loop(config: dict[str, Any]) -> dict[str, float]:
    """One rank. Returns the last `SFTProgress` as a dict; rank 0 has written the model folder."""
    from actors.learner import zero3

    job: RankJob = config["job"]
    options = job.options
    context = ray.train.get_context()
    rank, num_ranks = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(options.threads)
    torch.manual_seed(job.seed)  # for weights that the model's folder lacks
    zero3.init_distributed(
        rank, num_ranks, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
        "nccl" if options.gpus else "gloo", timeout_s=options.timeout_s,
    )  # fmt: skip
    on_gpu = options.gpus > 0
    tokenizer, (model,) = load_for_training(job.model, "AutoModelForCausalLM", dtype=options.dtype, on_gpu=on_gpu)
    prepare(model, options, job.model)
    examples: list[SFTExample] = ray.get(job.examples)
    lengths = [len(example) for example in examples]
    plan = plan_epochs(
        lengths, num_epochs=options.num_epochs, batch_size=options.batch_size, num_ranks=num_ranks,
        token_budget=options.tokens_per_microbatch, seed=job.seed, packed=options.packing,
    )  # fmt: skip
    engine = zero3.build_engine(
        model, options.optim, num_steps=len(plan), dtype=options.dtype, world_size=num_ranks,
        offload=options.offload == "cpu",
    )  # fmt: skip
    if options.packing:
        refuse_leaks(engine, job.model.policy)
    if job.checkpoint is not None:
        zero3.load_checkpoint(engine, Path(job.checkpoint), TAG)

    reporter = _Reporter(num_steps=len(plan), done=job.done)
    for step, hands in enumerate(plan[job.done :], start=job.done + 1):
        torch.manual_seed(((job.seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63)  # dropout is a function of it
        chosen = [index for hand in hands for rows in hand for index in rows]
        total_weight = sum(float(examples[index].target_weights.sum(dtype="float64")) for index in chosen)
        result = zero3.train_step(
            engine,
            [make_microbatch([examples[index] for index in rows], packed=options.packing) for rows in hands[rank]],
            partial(_loss_share, total_weight=total_weight),
            label=f"{LABEL}, step {step}, examples {_short(chosen)}",
        )
        reporter.add(step, result, num_tokens=sum(lengths[index] for index in chosen))
        if options.checkpoint_every is not None and step % options.checkpoint_every == 0 and step < len(plan):
            _checkpoint(engine, job, step)
    zero3.export(engine, tokenizer, Path(job.out_folder))
    return reporter.last


def prepare(model: Any, options: SFTOptions, source: ModelConfig) -> None:
    """Adapters and gradient checkpointing, as the options say. UserError where the architecture has no such thing."""
    if options.lora is not None:
        lora.add_adapters(model, options.lora, source, dropout=options.lora.dropout)
    if options.gradient_checkpointing:
        checkpoint_layers(model, source, section="sft")


@torch.no_grad()
def refuse_leaks(model: Any, name: str) -> None:
    """UserError when an example in a packed row changes with the one before it, as in an architecture with a state.

    model: an engine or a plain transformers model, called on every rank.
    """
    model.eval()
    positions = torch.arange(EMPTY_TOKENS, device=model.device).repeat(2)[None]

    def second(neighbour: int) -> torch.Tensor:
        ids = positions.clone()
        ids[:, :EMPTY_TOKENS] = neighbour
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, EMPTY_TOKENS:]

    one, other = second(0), second(1)
    if (one - other).abs().max() > LEAK[one.dtype] * one.std():
        raise UserError(
            f"sft.packing is on, but model.policy={name!r} mixes the examples of a row: its layers do not take their "
            "borders from position_ids; switch it off"
        )


def _checkpoint(engine: Any, job: RankJob, step: int) -> None:
    """Every rank writes its part, then rank 0 seals them as the only checkpoint. UserError when the disk is full."""
    from actors.learner import zero3

    folder = Path(job.out_folder)
    beside = folder / "engine.part"  # the store's own folder has a name that only rank 0 knows

    def save(into: Path) -> None:
        zero3.save_checkpoint(engine, beside, TAG)
        (beside / TAG).rename(into / TAG)
        shutil.rmtree(beside)  # DeepSpeed leaves a script beside each tag

    if engine.global_rank == 0:
        CheckpointStore(folder / CHECKPOINTS, keep=1).write(step, save, {"step": step, **job.identity})
    else:
        zero3.save_checkpoint(engine, beside, TAG)


def _short(indices: Sequence[int]) -> str:
    """
    >>> _short([7, 1, 2, 9, 4])
    '1, 2, 4 and 2 more'
    """
    text = ", ".join(str(index) for index in sorted(indices)[:3])
    return f"{text} and {len(indices) - 3} more" if len(indices) > 3 else text


def _loss_share(engine: Any, batch: SFTMicrobatch, *, total_weight: float) -> tuple[torch.Tensor, dict[str, float]]:
    """Weighted cross-entropy of a microbatch over the weight of the whole optimizer step, all ranks."""
    input_ids, position_ids, columns, labels, weights = (
        torch.from_numpy(getattr(batch, name)).to(engine.device)
        for name in ("input_ids", "position_ids", "columns", "labels", "weights")
    )
    # No attention mask: right padding needs none, and without one transformers tells packed examples apart by position.
    logits = engine(input_ids=input_ids, position_ids=position_ids, logits_to_keep=columns, use_cache=False).logits
    nll = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    loss = (nll * weights.flatten()).sum() / total_weight
    return loss, {"loss": float(loss.detach())}


class _Reporter:
    """Adds up steps and tells Ray Train every REPORT_EVERY of them, and at the last."""

    def __init__(self, *, num_steps: int, done: int) -> None:
        self.num_steps = num_steps
        self._before = done
        self.last: dict[str, float] = {}
        self._started = self._since = time.monotonic()
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._num_tokens = 0

    def add(self, step: int, result: Any, *, num_tokens: int) -> None:
        self._losses.append(result.metrics["loss"])
        self._norms.append(result.grad_norm)
        self._num_tokens += num_tokens
        if step % REPORT_EVERY and step != self.num_steps:
            return
        now = time.monotonic()
        self.last = asdict(
            SFTProgress(
                step=step,
                num_steps=self.num_steps,
                loss=sum(self._losses) / len(self._losses),
                grad_norm=sum(self._norms) / len(self._norms),
                lr=result.lr,
                tokens_per_s=self._num_tokens / (now - self._since),
                train_s=now - self._started,
                left_s=(now - self._started) / (step - self._before) * (self.num_steps - step),
            )
        )
        ray.train.report(self.last)
        self._since, self._num_tokens = now, 0
        self._losses.clear()
        self._norms.clear()
