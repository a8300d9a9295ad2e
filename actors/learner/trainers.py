"""The trainers of a learner rank: the policy with its reference, and the critic. Each is a ZeRO-3 engine.

A trainer knows neither Ray nor whether the other trainer runs in the same process. It gets advantages and returns, not
spans.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from actors.learner import lora, zero3
from actors.learner.export import check_folder, default_probe
from actors.learner.full_weights import FullWeights, get_shapes
from actors.learner.models import checkpoint_layers, load_for_training
from actors.learner.spec import LearnerSpec
from actors.learner.start_checks import check_shared_prompts, check_update_mode
from actors.vllm_compat.transports import IpcSender, NcclSender, Sender, import_communicator
from actors.weights.buckets import Bucket, Rendezvous, Shapes, make_bucket
from t2g import metrics as m
from t2g.algo.corrections import importance_weights
from t2g.algo.critic import Critic
from t2g.algo.head import install_chunked_head
from t2g.algo.kl import top_k_kl
from t2g.algo.logprobs import Rows, TokenOutputs
from t2g.algo.losses import Metrics, dpo_loss, kl_loss, policy_loss, supervised_loss, value_loss, weighted_sum
from t2g.algo.update_mode import disable_randomness, enter_update_mode
from t2g.config import Dtype
from t2g.types import TokenSequence, TrainSequence

ModelName = Literal["policy", "critic"]
Microbatch = Sequence[TokenSequence]
RankBatch = Sequence[Microbatch]  # microbatches of a rank; each rank has as many
Stats = list[dict[str, np.ndarray]]  # by field, of each sequence of a rank batch
DPO_BETA = 0.1  # the paper's, and TRL's default


class LoadedPolicy(NamedTuple):
    policy: Any
    reference: Any | None  # None if the loss needs none, and under LoRA, where it is the policy without adapters
    tokenizer: Any


def load_policy(spec: LearnerSpec, *, on_gpu: bool) -> LoadedPolicy:
    """Return policy, reference and tokenizer, see `load_for_training`."""
    config = spec.learner
    classes = ["AutoModelForCausalLM"]
    has_copy = spec.loss == "ppo" and config.lora is None
    if has_copy:
        classes *= 2
    torch.manual_seed(spec.seed)  # for adapters, and for weights that the model's folder lacks
    tokenizer, models = load_for_training(spec.model, *classes, on_gpu=on_gpu, **_load_options(spec))

    policy = models[0]
    reference = models[1] if has_copy else None
    prepare(policy, spec)
    for model in models:
        install_chunked_head(model)
    return LoadedPolicy(policy, reference, tokenizer)


def _load_options(spec: LearnerSpec) -> dict[str, Any]:
    return {
        "dtype": spec.learner.dtype,
        "longest_row": spec.longest_row,
        "share_prompts": spec.learner.share_prompts,
    }


def prepare(policy: Any, spec: LearnerSpec) -> None:
    """Add adapters and gradient checkpointing of the spec. Raises UserError if the architecture does not support it."""
    if spec.learner.lora is not None:
        lora.add_adapters(policy, spec.learner.lora, spec.model, dropout=spec.dropout)
    if spec.learner.gradient_checkpointing:
        section = "sft" if spec.loss == "supervised" else "learner"
        checkpoint_layers(policy, spec.model, section=section)


def load_critic(spec: LearnerSpec, *, on_gpu: bool) -> Critic:
    """Return the policy's backbone with a value head, see `load_for_training`."""
    config = spec.learner
    _, (backbone,) = load_for_training(spec.model, "AutoModel", on_gpu=on_gpu, **_load_options(spec))
    if config.gradient_checkpointing:
        checkpoint_layers(backbone, spec.model, section="learner")
    disable_randomness(backbone)
    return Critic(backbone)


def _memory(spec: LearnerSpec, num_ranks: int) -> dict[str, Any]:
    is_offloaded = spec.learner.offload == "cpu"
    return {"dtype": spec.learner.dtype, "world_size": num_ranks, "offload": is_offloaded}


def split_by_sequence(sequences: Microbatch, columns: Mapping[str, torch.Tensor]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the values of each sequence's response tokens, [N] -> [R]."""
    arrays = {name: column.cpu().numpy() for name, column in columns.items()}
    end = 0
    for sequence in sequences:
        start = end
        end += len(sequence.response_ids)
        yield {name: array[start:end] for name, array in arrays.items()}


class ModelTrainer:
    """A model on its ranks. Every call is a collective."""

    name: ModelName

    def __init__(self, spec: LearnerSpec, engine: zero3.Engine) -> None:
        self.spec = spec
        self.engine = engine

    @torch.no_grad()
    def forward(self, microbatches: RankBatch, fields: Collection[str]) -> Stats:
        """Return those of the `fields` of `TokenStats` that are this model's, [R] each, of each sequence in order."""
        self.engine.eval()
        return self._on_microbatches(microbatches, lambda rows: self._stats(rows, fields))

    def _on_microbatches(self, microbatches: RankBatch, compute: Callable[[Rows], dict[str, torch.Tensor]]) -> Stats:
        stats: Stats = []
        for sequences in microbatches:
            stats += split_by_sequence(sequences, compute(self._rows(sequences)))
        return stats

    def update(self, rank_batches: Sequence[RankBatch], *, kl_coef: float, label: str) -> Metrics:
        """Make one optimizer step per minibatch.

        Args:
            rank_batches: This rank's sequences of each minibatch.
            kl_coef: See `TrainBatch`.

        Returns:
            Means of the metrics over minibatches, maxima for names that end in _max; the same on all ranks.

        Raises:
            Diverged: A loss or gradient is not finite. The message names model, label and minibatch; that step is not
                applied.
        """

        def loss_fn(engine: zero3.Engine, sequences: Sequence[Any]) -> tuple[torch.Tensor, Metrics]:
            return self._loss(self._rows(sequences), kl_coef)

        self._enter_update_mode()
        rows: list[Metrics] = []
        for number, rank_batch in enumerate(rank_batches, start=1):
            where = f"{self.name}, {label}, minibatch {number} of {len(rank_batches)}"
            step = zero3.train_step(self.engine, rank_batch, loss_fn, label=where)
            own_metrics = {m.fill(m.GRAD_NORM, self.name): step.grad_norm, m.fill(m.LEARNING_RATE, self.name): step.lr}
            rows.append(step.metrics | own_metrics)

        reduced: Metrics = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            reduce = np.max if name.endswith("_max") else np.mean
            reduced[name] = float(reduce(values))
        return reduced

    def _enter_update_mode(self) -> None:
        if self.spec.loss == "supervised":  # with the model's own dropout
            self.engine.train()
        else:
            enter_update_mode(self.engine.module)

    def _rows(self, sequences: Microbatch) -> Rows:
        return Rows(sequences, self.engine.device, share_prompts=self.spec.learner.share_prompts)

    def _stats(self, rows: Rows, fields: Collection[str]) -> dict[str, torch.Tensor]:
        """Return fields of `TokenStats`, [N] each."""
        raise NotImplementedError

    def _loss(self, rows: Rows, kl_coef: float) -> tuple[torch.Tensor, Metrics]:
        """Return this microbatch's share of loss and metrics. kl_coef: of the KL term in the policy's loss."""
        raise NotImplementedError


class CriticTrainer(ModelTrainer):
    name = "critic"

    def __init__(self, spec: LearnerSpec, critic: Critic, num_ranks: int) -> None:
        num_steps = max(1, spec.num_updates) * spec.minibatches_per_update
        memory = _memory(spec, num_ranks)
        engine = zero3.build_engine(critic, spec.learner.critic, num_steps=num_steps, **memory)
        super().__init__(spec, engine)

    def _stats(self, rows: Rows, fields: Collection[str]) -> dict[str, torch.Tensor]:
        return {"values": rows.values(self.engine)}

    def _loss(self, rows: Rows, kl_coef: float) -> tuple[torch.Tensor, Metrics]:
        loss, metrics = value_loss(
            values=rows.values(self.engine),
            old_values=rows.column("values"),
            returns=rows.column("returns"),
            weights=rows.column("weights"),
            value_clip=self.spec.objective.value_clip or float("inf"),
        )
        return self.spec.objective.vf_coef * loss, metrics


class PolicyTrainer(ModelTrainer):
    """The policy and PPO's reference: a frozen copy, or under LoRA the same engine with disabled adapters."""

    name = "policy"

    def __init__(self, spec: LearnerSpec, policy: Any, reference: Any | None, tokenizer: Any, num_ranks: int) -> None:
        memory = _memory(spec, num_ranks)
        optim = None if spec.loss == "none" else spec.learner.policy
        num_updates = max(1, spec.num_updates - spec.warmup_updates)
        num_steps = num_updates * spec.minibatches_per_update
        engine = zero3.build_engine(policy, optim, num_steps=num_steps, **memory)
        super().__init__(spec, engine)
        self.tokenizer = tokenizer
        self._probe_ids = default_probe(policy)
        # The forward passes of an update with `defers_old_logprobs`: sequences, and statistics of their tokens.
        self._passes: list[tuple[Microbatch, dict[str, torch.Tensor]]] = []
        self._ref_engine = None if reference is None else zero3.build_engine(reference, None, **memory)
        if spec.loss in ("ppo", "dpo") and spec.learner.gradient_checkpointing:
            check_update_mode(engine, spec)
        if spec.learner.share_prompts:
            check_shared_prompts(engine, spec)
        self._sender = self._make_sender()

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """Yield the engine of the reference, without gradients."""
        with torch.no_grad():
            if self._ref_engine is not None:
                yield self._ref_engine
                return
            modes = {module: module.training for module in self.engine.module.modules()}
            self.engine.eval()
            with lora.adapters_off(self.engine.module):
                yield self.engine
            for module, is_training in modes.items():
                module.training = is_training

    def _stats(self, rows: Rows, fields: Collection[str]) -> dict[str, torch.Tensor]:
        temperature = self.spec.temperature
        has_reference = self.spec.loss == "ppo"  # DPO calls this once, before its first step
        foreign_fields = {"values", "ref_logprobs"} if has_reference else {"values"}

        stats: dict[str, torch.Tensor] = {}
        if set(fields) - foreign_fields:
            teacher = self.spec.objective.distillation
            top_k = teacher.top_k if teacher and "top_ids" in fields else 0
            outputs = rows.token_outputs(self.engine, temperature, entropy="entropy" in fields, top_k=top_k)
            columns = {
                "old_logprobs": outputs.logprobs,
                "ref_logprobs": outputs.logprobs,
                "entropy": outputs.entropy,
                "top_ids": outputs.top_ids,
            }
            stats = {name: column for name, column in columns.items() if name in fields}

        if has_reference and "ref_logprobs" in fields:
            with self._reference() as reference:
                stats["ref_logprobs"] = rows.token_outputs(reference, temperature).logprobs
        return stats

    @torch.no_grad()
    def score_teacher(self, microbatches: RankBatch) -> Stats:
        """Return the fields of `TeacherStats`, by the reference, of each `TeacherQuery` in order."""

        def score(rows: Rows) -> dict[str, torch.Tensor]:
            top_ids = rows.matrix("top_ids", 1) if self.spec.objective.distillation else None
            with self._reference() as reference:
                outputs = rows.token_outputs(reference, self.spec.temperature, token_ids=top_ids)
            scores = {"logprobs": outputs.logprobs}
            if outputs.requested_logprobs is not None:
                scores["top_logprobs"] = outputs.requested_logprobs
            return scores

        return self._on_microbatches(microbatches, score)

    def update(self, rank_batches: Sequence[RankBatch], *, kl_coef: float, label: str) -> Metrics:
        self._passes.clear()
        return super().update(rank_batches, kl_coef=kl_coef, label=label)

    def last_update_stats(self) -> Stats:
        """Return old logprobs and entropy, [R] each, of each sequence of the last update in order."""
        stats: Stats = []
        for sequences, columns in self._passes:
            stats += split_by_sequence(sequences, columns)
        return stats

    def _loss(self, rows: Rows, kl_coef: float) -> tuple[torch.Tensor, Metrics]:
        if self.spec.loss == "ppo":
            return self._ppo_loss(rows, kl_coef)
        logprobs = rows.token_outputs(self.engine, self.spec.temperature).logprobs
        inputs = {"logprobs": logprobs, "weights": rows.column("weights")}
        if self.spec.loss == "supervised":
            return supervised_loss(**inputs)
        return dpo_loss(
            **inputs,
            ref_logprobs=rows.column("ref_logprobs"),
            sequence_ids=rows.sequence_ids,
            num_pairs=len(rows.sequences) // 2,
            beta=DPO_BETA,
        )

    def _ppo_loss(self, rows: Rows, kl_coef: float) -> tuple[torch.Tensor, Metrics]:
        """Return this microbatch's share of (1 - w) L_pi + w L_teacher + kl_coef * KL - entropy_coef * H.

        w is the weight of a teacher that is distilled, else 0 (arXiv 2505.22338, section 3.3; arXiv 2601.20802 for
        L_teacher).
        """
        objective = self.spec.objective
        weights = rows.column("weights")
        outputs = self._update_outputs(rows, kl_coef)
        old_logprobs = self._old_logprobs(rows, outputs)
        correction = importance_weights(
            old_logprobs,
            rows.column("rollout_logprobs"),
            rows.sequence_ids,
            weights,
            objective.rollout_correction,
            objective.rollout_correction_cap,
        )
        loss, metrics = policy_loss(
            logprobs=outputs.logprobs,
            old_logprobs=old_logprobs,
            importance_weights=correction,
            advantages=rows.column("advantages"),
            weights=weights,
            sequence_ids=rows.sequence_ids,
            surrogate=objective.surrogate,
            clip_eps=objective.clip_eps,
            clip_eps_high=objective.resolve_clip_eps_high(),
        )

        teacher = objective.distillation
        if teacher is not None:
            divergence = top_k_kl(outputs.requested_logprobs, rows.matrix("teacher_logprobs", 1))
            distillation = weighted_sum(divergence * rows.column("teacher_mask"), weights)
            loss = (1 - teacher.weight) * loss + teacher.weight * distillation
            metrics[m.TEACHER_KL] = distillation.item()

        if outputs.full_kl is not None:
            kl = weighted_sum(outputs.full_kl, weights)
            loss = loss + kl_coef * kl
            metrics[m.KL_LOSS] = kl.item()
        elif kl_coef > 0:
            kl, kl_metrics = kl_loss(
                logprobs=outputs.logprobs,
                old_logprobs=old_logprobs,
                ref_logprobs=rows.column("ref_logprobs"),
                importance_weights=correction,
                weights=weights,
            )
            loss = loss + kl_coef * kl
            metrics = metrics | kl_metrics

        if objective.entropy_coef > 0:
            entropy = weighted_sum(outputs.entropy, weights)
            loss = loss - objective.entropy_coef * entropy
        return loss, metrics

    def _update_outputs(self, rows: Rows, kl_coef: float) -> TokenOutputs:
        """Return the outputs of the forward pass of an update that the objective needs."""
        objective = self.spec.objective
        ref_logits = None
        if kl_coef > 0 and objective.kl_estimator == "full":
            with self._reference() as reference:
                ref_logits = rows.logits(reference)
        has_entropy_term = objective.entropy_coef > 0
        needs_entropy = self.spec.defers_old_logprobs or has_entropy_term
        top_ids = rows.matrix("top_ids", 1) if objective.distillation else None
        return rows.token_outputs(
            self.engine,
            self.spec.temperature,
            entropy=needs_entropy,
            entropy_gradient=has_entropy_term,
            ref_logits=ref_logits,
            token_ids=top_ids,
        )

    def _old_logprobs(self, rows: Rows, outputs: TokenOutputs) -> torch.Tensor:
        """Return the old logprobs; with `defers_old_logprobs` those of this pass, which `last_update_stats` returns."""
        if not self.spec.defers_old_logprobs:
            return rows.column("old_logprobs")
        old_logprobs = outputs.logprobs.detach()
        stats = {"old_logprobs": old_logprobs, "entropy": outputs.entropy.detach()}
        self._passes.append((rows.sequences, stats))
        return old_logprobs

    def get_manifest(self) -> Shapes:
        """Return names and shapes of the sent weights, of the policy or its adapters. This is no collective."""
        return get_shapes(self.engine, adapters=self.spec.learner.sends_adapters)

    @cached_property
    def _weights(self) -> FullWeights:
        return FullWeights(self.engine, adapters=self.spec.learner.sends_adapters)

    def _make_sender(self) -> Sender | None:
        if self.spec.learner.is_replayable:
            return None
        if self.spec.learner.sync_transport == "ipc":
            return IpcSender(self.engine.global_rank)
        if self.engine.global_rank == 0:  # the sending one
            import_communicator()
        return NcclSender()

    def stream_weights(self, dtype: Dtype, full: bool, rendezvous: Rendezvous | None = None) -> Iterator[Bucket]:
        """Yield the policy's weights by bucket on rank 0; the other ranks join the gathers and yield nothing.

        The next bucket overwrites the arrays of the previous one.

        Args:
            full: Whether to hash each tensor.
            rendezvous: With nccl, that of rank 0 and the engines.
        """
        sender = self._sender
        target: dict[str, Any] = {}
        if sender is not None:
            target = {"device": self.engine.device, "on_all_ranks": sender.on_all_ranks}
            if rendezvous is not None and self.engine.global_rank == 0:
                sender.join_group(rendezvous, self.engine.device)

        bucket_bytes = int(self.spec.learner.sync_bucket_mib * 2**20)
        started = time.monotonic()
        for index, bucket in enumerate(self._weights.buckets(bucket_bytes, dtype, **target)):
            if not bucket:
                continue
            names, tensors = zip(*bucket, strict=True)
            if sender is not None:
                yield from sender.send(index, names, tensors, started)
            else:
                arrays = [_to_numpy(tensor) for tensor in tensors]
                yield make_bucket(index, names, arrays, full=full, started=started)
            started = time.monotonic()

    def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Return [N - 1] float32: log softmax(logits)[ids[t + 1]] after ids[: t + 1], at temperature 1."""
        self._probe_ids = ids
        self.engine.eval()
        return self._probe_logprobs(ids)

    @torch.no_grad()
    def _probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        weights = np.ones(len(ids) - 1)
        probe = TrainSequence(prompt_ids=ids[:1], response_ids=ids[1:], weights=weights)
        outputs = self._rows([probe]).token_outputs(self.engine, 1.0)
        return outputs.logprobs.cpu().numpy()

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder in safetensors with its tokenizer, and under LoRA its adapter.

        Raises:
            RunStopped: The folder, read back, is not the policy; see `export.check_folder`.
        """
        config = self.spec.learner
        expected = self.compute_probe_logprobs(self._probe_ids)
        zero3.export(self.engine, self.tokenizer, folder, self.spec.model)
        if self.engine.global_rank == 0:
            check_folder(
                folder,
                self._probe_ids,
                expected,
                like=self.engine.module,
                dtype=config.dtype,
                tolerance=config.export_tolerance,
            )


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the array of a tensor, for bfloat16 its bits in uint16: numpy has no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()
