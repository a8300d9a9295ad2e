"""What a rank of the learner holds: the policy with its reference, and the critic. Each part is a ZeRO-3 engine.

A part knows neither Ray nor whether the other part lives in the same process. Reward-blind: advantages and returns,
never spans.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from actors.learner import lora, zero3
from actors.learner.models import checkpoint_layers, load_for_training
from actors.learner.whole_weights import WholeWeights, metadata
from actors.weights.buckets import Bucket, Shapes, make_bucket
from actors.weights.transports import Meeting, Sender, make_sender
from t2g.algo.corrections import importance_weights
from t2g.algo.critic import Critic, disable_dropout
from t2g.algo.head import install_chunked_head
from t2g.algo.losses import Metrics, kl_loss, policy_loss, value_loss, weighted_sum
from t2g.algo.rows import Rows
from t2g.config import Dtype, LearnerConfig, ModelConfig, ObjectiveConfig
from t2g.data.batching import pack_tokens
from t2g.types import Microbatch, PackedTokens

PartName = Literal["policy", "critic"]
Share = Sequence[Sequence[Microbatch]]  # one rank's part of an update: [minibatch][microbatch]


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """What every rank must know."""

    model: ModelConfig
    learner: LearnerConfig
    objective: ObjectiveConfig
    temperature: float  # of the sampling: the policy is softmax(logits / temperature)
    num_updates: int  # calls of `update` in the whole run: the length of the learning-rate schedules
    seed: int

    @property
    def warmup_updates(self) -> int:
        """First updates in which the policy rests."""
        return self.learner.critic_warmup_steps if self.objective.uses_critic else 0


def load_policy(spec: LearnerSpec, *, on_gpu: bool) -> tuple[Any, Any | None, Any]:
    """Policy, reference and tokenizer, see `load_for_training`. No reference under LoRA: it is the policy itself."""
    config = spec.learner
    classes = ["AutoModelForCausalLM"] * (1 if config.lora else 2)
    tokenizer, models = load_for_training(spec.model, *classes, dtype=config.dtype, on_gpu=on_gpu)
    policy, reference = (*models, None)[:2]
    if config.lora:
        torch.manual_seed(spec.seed)  # of the adapters
        lora.add_adapters(policy, config.lora, spec.model, dropout=0.0)
    if config.gradient_checkpointing:
        checkpoint_layers(policy, spec.model, section="learner")
    for model in models:
        disable_dropout(model)
        install_chunked_head(model)
    return policy, reference, tokenizer


def load_critic(spec: LearnerSpec, *, on_gpu: bool) -> Critic:
    """The policy's backbone with a value head, see `load_for_training`."""
    config = spec.learner
    _, (backbone,) = load_for_training(spec.model, "AutoModel", dtype=config.dtype, on_gpu=on_gpu)
    if config.gradient_checkpointing:
        checkpoint_layers(backbone, spec.model, section="learner")
    critic = Critic(backbone)
    disable_dropout(critic)
    return critic


def _memory(spec: LearnerSpec, num_ranks: int) -> dict[str, Any]:
    return {"dtype": spec.learner.dtype, "world_size": num_ranks, "offload": spec.learner.offload == "cpu"}


def _num_steps(spec: LearnerSpec, num_updates: int) -> int:
    return max(1, num_updates) * spec.learner.num_epochs * spec.learner.minibatches_per_epoch


class CriticPart:
    """The critic. Every call is a collective of its ranks."""

    def __init__(self, spec: LearnerSpec, critic: Critic, num_ranks: int) -> None:
        self.spec = spec
        self.engine = zero3.build_engine(
            critic, spec.learner.critic, num_steps=_num_steps(spec, spec.num_updates), **_memory(spec, num_ranks)
        )

    @torch.no_grad()
    def forward(self, microbatches: Sequence[PackedTokens]) -> list[dict[str, np.ndarray]]:
        """Of each microbatch values [T] float32, of the state before each token."""
        self.engine.eval()
        return [{"values": Rows(m, self.engine.device).values(self.engine).cpu().numpy()} for m in microbatches]

    def update(self, share: Share, *, kl_coef: float, label: str) -> Metrics:
        """One optimizer step per minibatch, see `_train`; kl_coef is the policy's affair."""
        return _train("critic", self.engine, share, self._loss, label)

    def _loss(self, engine: Any, microbatch: Microbatch) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = value_loss(
            values=Rows(microbatch, engine.device).values(engine),
            value_clip=self.spec.objective.value_clip,
            **_tensors(microbatch, engine.device, "returns", "weights", old_values="values"),
        )
        return self.spec.objective.vf_coef * loss, metrics


class PolicyPart:
    """The policy and its reference: a frozen copy, and under LoRA the same engine with its adapters off.

    Every call is a collective of its ranks, except `announce`.
    """

    def __init__(self, spec: LearnerSpec, policy: Any, reference: Any | None, tokenizer: Any, num_ranks: int) -> None:
        self.spec, self.tokenizer = spec, tokenizer
        memory = _memory(spec, num_ranks)
        num_steps = _num_steps(spec, spec.num_updates - spec.warmup_updates)
        self.engine = zero3.build_engine(policy, spec.learner.policy, num_steps=num_steps, **memory)
        self._copy = None if reference is None else zero3.frozen_engine(reference, **memory)

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """The engine that computes the reference; within the block it is not the policy, and takes no gradient."""
        with torch.no_grad():
            if self._copy is not None:
                yield self._copy
                return
            was_training = self.engine.module.training
            self.engine.eval()
            with lora.adapters_off(self.engine.module):
                yield self.engine
            self.engine.train(was_training)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[PackedTokens]) -> list[dict[str, np.ndarray]]:
        """Of each microbatch old_logprobs, entropy, ref_logprobs, [T] float32, 0 at each sequence's first token."""
        self.engine.eval()
        temperature, found = self.spec.temperature, []
        for rows in (Rows(m, self.engine.device) for m in microbatches):
            now = rows.token_outputs(self.engine, temperature, entropy=True)
            with self._reference() as reference:
                ref_logprobs = rows.token_outputs(reference, temperature).logprobs
            arrays = {"old_logprobs": now.logprobs, "entropy": now.entropy, "ref_logprobs": ref_logprobs}
            found.append({name: array.cpu().numpy() for name, array in arrays.items()})
        return found

    def update(self, share: Share, *, kl_coef: float, label: str) -> Metrics:
        """One optimizer step per minibatch, see `_train`. kl_coef: of the KL as a term of the loss."""
        return _train("policy", self.engine, share, lambda engine, m: self._loss(engine, m, kl_coef), label)

    def _loss(self, engine: Any, microbatch: Microbatch, kl_coef: float) -> tuple[torch.Tensor, Metrics]:
        """L_pi + kl_coef * KL - entropy_coef * H, this microbatch's share of each (method.md, stage 3)."""
        objective = self.spec.objective
        rows = Rows(microbatch, engine.device)
        given = _tensors(
            microbatch, engine.device,
            "segment_ids", "weights", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs",
        )  # fmt: skip
        old_logprobs, weights, ref_logits = given["old_logprobs"], given["weights"], None
        if kl_coef > 0 and objective.kl_estimator == "full":
            with self._reference() as reference:
                ref_logits = rows.logits(reference)
        now = rows.token_outputs(
            engine, self.spec.temperature, entropy=objective.entropy_coef > 0, ref_logits=ref_logits
        )
        correction = importance_weights(
            old_logprobs, given["rollout_logprobs"], given["segment_ids"], weights,
            objective.importance, objective.importance_cap,
        )  # fmt: skip
        loss, metrics = policy_loss(
            logprobs=now.logprobs, old_logprobs=old_logprobs, importance_weights=correction,
            advantages=given["advantages"], weights=weights, clip_eps=objective.clip_eps,
        )  # fmt: skip
        if now.full_kl is not None:
            kl = weighted_sum(now.full_kl, weights)
            loss, metrics["policy/kl_loss"] = loss + kl_coef * kl, kl.item()
        elif kl_coef > 0:
            kl, found = kl_loss(logprobs=now.logprobs, ref_logprobs=given["ref_logprobs"], weights=weights)
            loss, metrics = loss + kl_coef * kl, metrics | found
        if now.entropy is not None:
            loss = loss - objective.entropy_coef * weighted_sum(now.entropy, weights)
        return loss, metrics

    def announce(self) -> Shapes:
        """Names and shapes of the policy, in the order of `stream_weights`."""
        return metadata(self.engine)

    @cached_property
    def _weights(self) -> WholeWeights:
        return WholeWeights(self.engine)

    @cached_property
    def _sender(self) -> Sender | None:
        transport = self.spec.learner.sync_transport
        return None if transport == "store" else make_sender(transport, self.engine.global_rank)

    def stream_weights(self, dtype: Dtype, full: bool, meeting: Meeting | None = None) -> Iterator[Bucket]:
        """The policy's weights, bucket by bucket on rank 0; the other ranks join the gathers and yield nothing.

        full: with a hash of each tensor. A bucket's arrays are to be read before the next one is asked for.
        meeting: with nccl, of rank 0 and the engines.
        """
        sender, where = self._sender, {}
        if sender is not None:
            where = {"device": self.engine.device, "everywhere": sender.everywhere}
            if meeting is not None and self.engine.global_rank == 0:
                sender.meet(meeting)
        bucket_bytes, started = int(self.spec.learner.sync_bucket_mib * 2**20), time.monotonic()
        for index, bucket in enumerate(self._weights.buckets(bucket_bytes, dtype, **where)):
            if bucket:
                names, tensors = zip(*bucket, strict=True)
                if sender is not None:
                    yield from sender.send(index, names, tensors, started)
                else:
                    yield make_bucket(index, names, [_wire(tensor) for tensor in tensors], full=full, started=started)
                started = time.monotonic()

    @torch.no_grad()
    def probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[N - 1] float32: log softmax(logits)[ids[t + 1]] after ids[: t + 1], at temperature 1."""
        self.engine.eval()
        rows = Rows(pack_tokens([ids]), self.engine.device)
        return rows.token_outputs(self.engine, 1.0).logprobs[1:].cpu().numpy()

    def export(self, folder: Path) -> None:
        """The policy as a Hugging Face folder in safetensors, tokenizer included; under LoRA the adapter as well."""
        zero3.export(self.engine, self.tokenizer, folder)


def _train(name: PartName, engine: Any, share: Share, loss_fn: zero3.LossFunction, label: str) -> Metrics:
    """One optimizer step per minibatch; metrics are means over them (maxima where so named), the same on every rank.

    Raises RunStopped naming part, label and minibatch when a loss or gradient is not finite; that step is not applied.
    """
    rows = []
    for number, microbatches in enumerate(share, start=1):
        where = f"{name}, {label}, minibatch {number} of {len(share)}"
        step = zero3.train_step(engine, microbatches, loss_fn, label=where)
        rows.append(step.metrics | {f"{name}/grad_norm": step.grad_norm, f"{name}/lr": step.lr})
    reduce: dict[str, Callable[..., Any]] = {key: np.max if key.endswith("_max") else np.mean for key in rows[0]}
    return {key: float(fn([row[key] for row in rows])) for key, fn in reduce.items()}


def _tensors(microbatch: Microbatch, device: torch.device, *names: str, **renamed: str) -> dict[str, torch.Tensor]:
    """Fields of a microbatch as [T] tensors, by their own name or as parameter=field."""
    fields = dict(zip(names, names, strict=True)) | renamed
    return {key: torch.tensor(getattr(microbatch, name), device=device) for key, name in fields.items()}


def _wire(tensor: torch.Tensor) -> np.ndarray:
    """float32 as it is, bfloat16 as its bits: numpy has no bfloat16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
