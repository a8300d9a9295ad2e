"""The learner group: policy, frozen reference and critic on the same ZeRO-3 ranks, one Ray actor per rank.

`LearnerWorker` is one rank, a plain class all of whose calls are collectives; `LearnerGroup` is the driver's side and
implements `t2g.interfaces.Learner` and `actors.weight_sync.WeightOwner`. Reward-blind: advantages and returns, never
spans.
"""

import json
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import remove_placement_group

from actors import placement
from actors.fanout import collect
from actors.loading import load_for_training
from actors.weight_sync import Bucket, ParamMeta
from t2g.algo.corrections import importance_metrics
from t2g.algo.critic import Critic, disable_dropout
from t2g.algo.losses import Metrics, policy_loss, value_loss
from t2g.algo.rows import Rows
from t2g.data.batching import empty_tokens, pack_tokens, plan_microbatches
from t2g.errors import RunStopped, UserError
from t2g.sections import Dtype, LearnerConfig, ModelConfig, ObjectiveConfig
from t2g.types import Microbatch, PackedTokens, Rollout, TokenStats, TrainBatch, UpdateResult

STATE_FILE = "learner.json"
STREAM_AHEAD = 2  # buckets gathered before the first is taken: the next gather overlaps with the present send


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """What every rank must know."""

    model: ModelConfig
    learner: LearnerConfig
    objective: ObjectiveConfig
    temperature: float  # of the sampling: the policy is softmax(logits / temperature)
    num_updates: int  # calls of `update` in the whole run: the length of the learning-rate schedules
    seed: int


@dataclass(frozen=True, kw_only=True)
class RankMinibatch:
    """One rank's part of a minibatch."""

    microbatches: tuple[Microbatch, ...]
    num_tokens: int  # global


def load_models(spec: LearnerSpec) -> tuple[torch.nn.Module, torch.nn.Module, Critic, Any]:
    """Policy, reference, critic and tokenizer, see `load_for_training`."""
    config = spec.learner
    classes = ("AutoModelForCausalLM", "AutoModelForCausalLM", "AutoModel")
    tokenizer, (policy, reference, backbone) = load_for_training(
        spec.model, *classes, dtype=config.dtype, on_gpu=config.gpus > 0
    )
    critic = Critic(backbone)
    for model in (policy, reference, critic):
        disable_dropout(model)
    return policy, reference, critic, tokenizer


class LearnerWorker:
    """One rank. After `start` every call is made on all ranks, in the same order."""

    def __init__(self, spec: LearnerSpec, rank: int) -> None:
        torch.set_num_threads(spec.learner.threads)
        self.spec = spec
        self.rank = rank
        self.num_ranks = spec.learner.workers
        self.num_updates = 0  # done so far: the policy version
        self._port: socket.socket | None = None  # of rank 0: the port of the rendezvous

    def address(self) -> tuple[str, int]:
        """Where this rank can hold the rendezvous: its node's address and a port, kept from others until `start`."""
        self._port = socket.socket()
        self._port.bind(("", 0))
        return ray.util.get_node_ip_address(), self._port.getsockname()[1]

    def start(self, master_addr: str, master_port: int) -> None:
        """Join the group, load the models, partition them. UserError names model.policy when it cannot be loaded."""
        from actors import zero3

        config = self.spec.learner
        policy, reference, critic, self.tokenizer = load_models(self.spec)
        backend = "nccl" if config.gpus else "gloo"
        if self._port is not None:
            self._port.close()  # not before the models are loaded: engines that start beside us look for ports
        zero3.init_distributed(
            self.rank, self.num_ranks, master_addr, master_port, backend, timeout_s=config.step_timeout_s
        )
        shared = {"dtype": config.dtype, "world_size": self.num_ranks}
        per_update = config.num_epochs * config.minibatches_per_epoch
        policy_steps = max(1, self.spec.num_updates - config.critic_warmup_steps) * per_update
        self.policy = zero3.build_engine(policy, config.policy, num_steps=policy_steps, **shared)
        self.critic = zero3.build_engine(critic, config.critic, num_steps=self.spec.num_updates * per_update, **shared)
        self.reference = zero3.frozen_engine(reference, **shared)
        torch.manual_seed(self.spec.seed * 1_000_003 + self.rank)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[PackedTokens]) -> list[TokenStats]:
        """Of each microbatch, arrays [T] aligned with its input_ids; 0 at the first token of each sequence."""
        for engine in (self.policy, self.reference, self.critic):
            engine.eval()
        return [self._stats(Rows(tokens, self.policy.device)) for tokens in microbatches]

    def _stats(self, rows: Rows) -> TokenStats:
        temperature = self.spec.temperature
        logits = rows.logits(self.policy)
        old_logprobs, entropy = rows.logprobs(logits, temperature), rows.entropy(logits, temperature)
        del logits  # [S * L, V] is the largest thing here: never hold two
        ref_logprobs = rows.logprobs(rows.logits(self.reference), temperature)
        return TokenStats(
            old_logprobs=old_logprobs.cpu().numpy(),
            ref_logprobs=ref_logprobs.cpu().numpy(),
            values=rows.values(self.critic).cpu().numpy(),
            entropy=entropy.cpu().numpy(),
        )

    def update(self, minibatches: Sequence[RankMinibatch]) -> Metrics:
        """One optimizer step of policy and critic per minibatch; metrics are the same on every rank.

        The policy rests during the first `critic_warmup_steps` updates. Raises RunStopped naming model and minibatch
        when a loss or gradient is not finite; that step is not applied.
        """
        from actors import zero3

        rows: list[Metrics] = []
        for number, minibatch in enumerate(minibatches, start=1):
            where = f"update {self.num_updates + 1}, minibatch {number} of {len(minibatches)}"
            metrics: Metrics = {}
            for name, engine, loss_fn in (
                ("policy", self.policy, self._policy_loss),
                ("critic", self.critic, self._critic_loss),
            ):
                if name == "policy" and self.num_updates < self.spec.learner.critic_warmup_steps:
                    continue
                step = zero3.train_step(
                    engine,
                    minibatch.microbatches,
                    lambda e, m, fn=loss_fn, n=minibatch.num_tokens: fn(e, m, n),
                    label=f"{name}, {where}",
                )
                metrics |= step.metrics | {f"{name}/grad_norm": step.grad_norm, f"{name}/lr": step.lr}
            rows.append(metrics)
        self.num_updates += 1
        reduce = {name: np.max if name.endswith("_max") else np.mean for name in rows[0]}
        return {name: float(fn([row[name] for row in rows])) for name, fn in reduce.items()}

    def _policy_loss(self, engine: Any, microbatch: Microbatch, num_tokens: int) -> tuple[torch.Tensor, Metrics]:
        rows, objective = Rows(microbatch, engine.device), self.spec.objective
        tensors = _tensors(
            microbatch, engine.device, "old_logprobs", "rollout_logprobs", "advantages", mask="loss_mask"
        )
        return policy_loss(
            logprobs=rows.logprobs(rows.logits(engine), self.spec.temperature),
            num_tokens=num_tokens,
            clip_eps=objective.clip_eps,
            importance_cap=objective.importance_cap,
            **tensors,
        )

    def _critic_loss(self, engine: Any, microbatch: Microbatch, num_tokens: int) -> tuple[torch.Tensor, Metrics]:
        tensors = _tensors(microbatch, engine.device, "returns", old_values="values", mask="loss_mask")
        loss, metrics = value_loss(
            values=Rows(microbatch, engine.device).values(engine),
            num_tokens=num_tokens,
            value_clip=self.spec.objective.value_clip,
            **tensors,
        )
        return self.spec.objective.vf_coef * loss, metrics

    def announce(self) -> list[ParamMeta]:
        """Names and shapes of the policy, in the order of `stream_weights`."""
        from actors import zero3

        return zero3.metadata(self.policy)

    def stream_weights(self, dtype: Dtype) -> Iterator[Bucket]:
        """The policy's weights, bucket by bucket on rank 0; the other ranks join the gathers and yield nothing."""
        from actors import zero3

        bucket_bytes = int(self.spec.learner.sync_bucket_mib * 2**20)
        for index, bucket in enumerate(zero3.full_parameters(self.policy, bucket_bytes, dtype)):
            if bucket:
                names, tensors = zip(*bucket, strict=True)
                yield Bucket(index=index, names=names, tensors=tuple(_wire(tensor) for tensor in tensors))

    @torch.no_grad()
    def probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[N - 1] float32: log softmax(logits)[ids[t + 1]] after ids[: t + 1], at temperature 1."""
        self.policy.eval()
        rows = Rows(pack_tokens([ids]), self.policy.device)
        return rows.logprobs(rows.logits(self.policy), 1.0)[1:].cpu().numpy()

    def save(self, folder: Path) -> None:
        """Policy, critic, their optimizers and schedules, RNG: folder must exist and be empty."""
        from actors import zero3

        zero3.save_checkpoint(self.policy, folder, "policy")
        zero3.save_checkpoint(self.critic, folder, "critic")
        torch.save(torch.get_rng_state(), folder / f"rng-{self.rank}.pt")
        if self.rank == 0:
            state = {"num_updates": self.num_updates, "num_ranks": self.num_ranks}
            (folder / STATE_FILE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """What `save` wrote. UserError when it was written by another number of ranks."""
        from actors import zero3

        state = json.loads((folder / STATE_FILE).read_text())
        if state["num_ranks"] != self.num_ranks:
            raise UserError(
                f"learner.workers is {self.num_ranks}, but {folder} was written by {state['num_ranks']} ranks: "
                "set it back, or start from the exported policy"
            )
        zero3.load_checkpoint(self.policy, folder, "policy")
        zero3.load_checkpoint(self.critic, folder, "critic")
        torch.set_rng_state(torch.load(folder / f"rng-{self.rank}.pt", weights_only=True))
        self.num_updates = state["num_updates"]

    def export(self, folder: Path) -> None:
        """The policy as a Hugging Face folder in safetensors, tokenizer included."""
        from actors import zero3

        zero3.export(self.policy, self.tokenizer, folder)


def _tensors(microbatch: Microbatch, device: torch.device, *names: str, **renamed: str) -> dict[str, torch.Tensor]:
    """Fields of a microbatch as [T] tensors, by their own name or as parameter=field."""
    fields = {name: name for name in names} | renamed
    return {key: torch.tensor(getattr(microbatch, name), device=device) for key, name in fields.items()}


def _wire(tensor: torch.Tensor) -> np.ndarray:
    """float32 as it is, bfloat16 as its bits: numpy has no bfloat16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


LearnerActor = ray.remote(LearnerWorker)


class LearnerGroup:
    """The driver's side. Every call goes to all ranks and has `learner.step_timeout_s`; see `fanout.collect`.

    After an exception the ranks may be out of step with each other: `close` and start again from a checkpoint.
    """

    def __init__(self, spec: LearnerSpec, *, placement_timeout_s: float) -> None:
        """Start all ranks and wait for them. UserError when they find no place or the model cannot be loaded."""
        self.spec = spec
        self.policy_version = 0
        self._groups = placement.reserve("learner", spec.learner, timeout_s=placement_timeout_s)
        self.workers = [
            LearnerActor.options(**placement.actor_options(spec.learner, group)).remote(spec, rank)
            for rank, group in enumerate(self._groups)
        ]
        try:
            ((addr, port),) = self._collect([self.workers[0].address.remote()], "address")
            self._collect([w.start.remote(addr, port) for w in self.workers], "start")
        except BaseException:
            self.close()
            raise

    def _collect(self, refs: Sequence[ray.ObjectRef], call: str) -> list[Any]:
        return collect(refs, who="learner rank", call=call, timeout_s=self.spec.learner.step_timeout_s)

    def forward(self, rollouts: Sequence[Rollout]) -> list[TokenStats]:
        """Old logprobs, reference logprobs, values and entropy, each [R], in the order of `rollouts`."""
        if not rollouts:
            return []
        sequences = [np.concatenate([r.prompt_ids, r.response_ids]) for r in rollouts]
        config = self.spec.learner
        plan = plan_microbatches([len(s) for s in sequences], config.workers, config.tokens_per_microbatch)
        results = self._collect(
            [
                worker.forward.remote([pack_tokens([sequences[i] for i in m]) if m else empty_tokens() for m in micro])
                for worker, micro in zip(self.workers, plan, strict=True)
            ],
            "forward",
        )
        stats: dict[int, TokenStats] = {}
        for micro, packed in zip(plan, results, strict=True):
            for members, arrays in zip(micro, packed, strict=True):
                end = 0
                for i in members:
                    start, end = end + len(rollouts[i].prompt_ids), end + len(sequences[i])
                    stats[i] = TokenStats(**{name: array[start:end] for name, array in vars(arrays).items()})
        return [stats[i] for i in range(len(rollouts))]

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Every optimizer step of the batch. Metrics: means over minibatches, names as in `t2g.metrics`."""
        started = time.monotonic()
        shares = [
            [RankMinibatch(microbatches=m.microbatches[rank], num_tokens=m.num_tokens) for m in batch.minibatches]
            for rank in range(len(self.workers))
        ]
        refs = [worker.update.remote(share) for worker, share in zip(self.workers, shares, strict=True)]
        metrics, *_ = self._collect(refs, "update")
        seconds = time.monotonic() - started
        self.policy_version += 1
        packed = [m for minibatch in batch.minibatches for micro in minibatch.microbatches for m in micro]
        old, rollout, mask = (
            torch.from_numpy(np.concatenate([getattr(m, name) for m in packed]))
            for name in ("old_logprobs", "rollout_logprobs", "loss_mask")
        )
        metrics |= importance_metrics(old, rollout, mask, self.spec.objective.importance_cap)
        metrics["learner/optimizer_steps"] = float(len(batch.minibatches))
        metrics["learner/tokens_per_s"] = len(mask) / seconds
        return UpdateResult(policy_version=self.policy_version, metrics=metrics)

    def announce(self) -> list[ParamMeta]:
        """Names and shapes of the policy in the order of `stream_weights`; nothing is gathered."""
        (metas,) = self._collect([self.workers[0].announce.remote()], "announce")
        return metas

    def stream_weights(self, dtype: Dtype) -> Generator["ray.ObjectRef[Bucket]", None, None]:
        """References to buckets in rank 0's object store; rank 0 gathers STREAM_AHEAD buckets ahead of the consumer.

        No other call until all are taken: the ranks are in the middle of this one. Closing the iterator early waits
        for nothing; Ray then takes the rest from the ranks and drops it.
        """
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": STREAM_AHEAD}
        streams = [w.stream_weights.options(**options).remote(dtype) for w in self.workers]
        yield from self._buckets(streams[0])
        self._collect([stream.completed() for stream in streams], "stream_weights")

    def _buckets(self, stream: Any) -> Iterator["ray.ObjectRef[Bucket]"]:
        timeout_s = self.spec.learner.step_timeout_s
        while True:
            ready, _ = ray.wait([stream], timeout=timeout_s, fetch_local=False)
            if not ready:
                raise RunStopped(f"learner rank 0 is late: no bucket of weights came within {timeout_s:g} s")
            try:
                ref = next(stream)
            except StopIteration:
                return
            if ray.wait([stream.completed()], timeout=0)[0]:  # a stream that failed ends in a reference that raises
                self._collect([stream.completed()], "stream_weights")
            yield ref

    def probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[N - 1] float32, at temperature 1: what a worker with the same weights must say of the same tokens."""
        return self._collect([w.probe_logprobs.remote(ids) for w in self.workers], "probe_logprobs")[0]

    def save(self, folder: Path) -> None:
        """Model, optimizer, scheduler and RNG of every rank, into an existing empty folder that all ranks see."""
        self._collect([w.save.remote(folder) for w in self.workers], "save")

    def load(self, folder: Path) -> None:
        """What `save` wrote; the next update is the one that would have followed."""
        self._collect([w.load.remote(folder) for w in self.workers], "load")
        self.policy_version = json.loads((folder / STATE_FILE).read_text())["num_updates"]

    def export(self, folder: Path) -> None:
        """The policy as a Hugging Face folder in safetensors, tokenizer included."""
        self._collect([w.export.remote(folder) for w in self.workers], "export")

    def close(self) -> None:
        """Kill the ranks and give their places back. Safe to call twice."""
        while self.workers:
            ray.kill(self.workers.pop(), no_restart=True)
            remove_placement_group(self._groups.pop())
