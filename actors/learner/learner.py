"""The learner: policy and critic on ZeRO-3 ranks, one Ray actor per rank, in one group or in two.

`LearnerWorker` is one rank, a plain class whose calls are collectives; it has the trainers (`models`) of its group.
`LearnerGroup` is the driver's side and implements `t2g.interfaces.Learner` and `actors.weights.round.WeightSource`. It
makes each call once per model, on the ranks of that model. Policy and critic may share their ranks; on separate ranks
they work at the same time.
"""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import ray
import torch

from actors.cluster.fanout import any_failed
from actors.cluster.kept_placements import KeptPlacements
from actors.cluster.placement import listening_environment
from actors.learner import zero3
from actors.learner.rank_batches import (
    PEAK_MEMORY,
    correction_metrics,
    make_zero_stats,
    merge_metrics,
    select_rank_batch,
    with_old_logprobs,
)
from actors.learner.ranks import Ranks, rank_environment
from actors.learner.spec import LearnerSpec
from actors.learner.trainers import CriticTrainer, ModelName, PolicyTrainer, RankBatch, Stats, load_critic, load_policy
from actors.weights.buckets import Bucket, Rendezvous, Shapes
from t2g import metrics as m
from t2g.algo.losses import Metrics
from t2g.config import Dtype, RoleConfig
from t2g.data.shared_prompts import repeated_prompt_lengths
from t2g.errors import LearnerLost, RankFailed
from t2g.files import describe_file
from t2g.resources.flops import peak_flops, train_flops
from t2g.resources.host_memory import advise
from t2g.resources.model_shape import shape_of
from t2g.types import (
    TeacherQuery,
    TeacherStats,
    TokenIds,
    TokenSequence,
    TokenStats,
    TrainBatch,
    UpdateResult,
)

STATE_FILE = "learner.json"
FAILURE_POLL_S = 5.0  # to detect a dead rank whose connections did not break
STREAM_AHEAD = 2  # buckets gathered ahead of the consumer: a gather overlaps with the previous send


class LearnerWorker:
    """One rank. After `start` every call is made on all ranks of the group in the same order."""

    def __init__(self, spec: LearnerSpec, names: Sequence[ModelName], role: RoleConfig, rank: int) -> None:
        torch.set_num_threads(role.threads)
        self.spec = spec
        self.names = names
        self.role = role
        self.rank = rank
        self.models: dict[ModelName, PolicyTrainer | CriticTrainer] = {}
        self._port: socket.socket | None = None  # reserves the port of the rendezvous, on rank 0

    def address(self) -> tuple[str, int]:
        """Return the address and a port of a rendezvous on this rank; the port stays reserved until then."""
        self._port = socket.socket()
        self._port.bind((ray.util.get_node_ip_address(), 0))
        return self._port.getsockname()

    def start(self, master: tuple[str, int]) -> None:
        """Load the models, join the group, partition the models. UserError if model.policy cannot be loaded.

        Args:
            master: `address` of rank 0.
        """
        on_gpu = self.role.gpus > 0
        num_ranks = self.role.workers
        policy = load_policy(self.spec, on_gpu=on_gpu) if "policy" in self.names else None
        critic = load_critic(self.spec, on_gpu=on_gpu) if "critic" in self.names else None

        if self._port is not None:
            self._port.close()  # not before the models are loaded: engines that start now look for free ports
        os.environ.update(listening_environment(os.environ))
        backend = "nccl" if on_gpu else "gloo"
        timeout_s = self.spec.learner.step_timeout_s
        zero3.init_distributed(self.rank, num_ranks, *master, backend, timeout_s=timeout_s)

        if policy is not None:
            self.models["policy"] = PolicyTrainer(self.spec, *policy, num_ranks)
        if critic is not None:
            self.models["critic"] = CriticTrainer(self.spec, critic, num_ranks)
        torch.manual_seed(self.spec.seed * 1_000_003 + self.rank)

    def forward(self, model: ModelName, rank_batches: Sequence[RankBatch], fields: Collection[str]) -> Stats:
        return self.models[model].forward(*rank_batches, fields)

    def score_teacher(self, rank_batches: Sequence[RankBatch]) -> Stats:
        return self.models["policy"].score_teacher(*rank_batches)

    def update(self, model: ModelName, rank_batches: Sequence[RankBatch], kl_coef: float, label: str) -> Metrics:
        if self.role.gpus:
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        metrics = self.models[model].update(rank_batches, kl_coef=kl_coef, label=label)
        seconds = time.monotonic() - started
        metrics = metrics | {PEAK_MEMORY: _peak_gib(self.role)}
        return metrics | self._utilization(model, rank_batches, seconds)

    def _utilization(self, model: ModelName, rank_batches: Sequence[RankBatch], seconds: float) -> Metrics:
        """Return this rank's model FLOPs utilization; {} on a CPU, in float32, and for a model of unknown shape."""
        if not self.role.gpus:
            return {}
        peak = peak_flops(torch.cuda.get_device_name())
        if peak is None:
            return {}

        module: Any = self.models[model].engine.module
        backbone = getattr(module, "backbone", module)
        model_config = backbone.config.get_text_config()
        shape = shape_of(model_config.to_dict())
        if shape is None or self.spec.learner.dtype != "bfloat16":
            return {}

        lengths: list[int] = []
        repeated: list[int] = []  # lengths of the prompts that are not computed again
        for microbatch in chain.from_iterable(rank_batches):
            lengths.extend(map(len, microbatch))
            if self.spec.learner.share_prompts:
                repeated += repeated_prompt_lengths(microbatch)
        is_policy = model == "policy"
        frozen = is_policy and self.spec.learner.lora is not None
        count_flops = partial(train_flops, shape, has_head=is_policy, frozen=frozen)
        flops = count_flops(lengths) - count_flops(repeated)
        return {m.fill(m.MFU, model): flops / seconds / peak}

    def last_update_stats(self) -> Stats:
        return self.models["policy"].last_update_stats()

    def get_manifest(self) -> Shapes:
        return self.models["policy"].get_manifest()

    def stream_weights(self, dtype: Dtype, full: bool, rendezvous: Rendezvous | None = None) -> Iterator[Bucket]:
        if self._port is not None:
            self._port.close()
        yield from self.models["policy"].stream_weights(dtype, full, rendezvous)

    def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        return self.models["policy"].compute_probe_logprobs(ids)

    def export(self, folder: Path) -> None:
        self.models["policy"].export(folder)

    def save(self, model: ModelName, folder: Path) -> dict[str, dict[str, Any]]:
        """Write the model, its optimizer and schedule, and the RNGs into an existing folder; wait for all ranks.

        Returns:
            `t2g.files.describe_file` of the files of this rank, by their names in the folder.
        """
        rng_file = self._rng_file(model, folder)
        torch.save(torch.get_rng_state(), rng_file)
        zero3.save_checkpoint(self.models[model].engine, folder, model)

        shards = (folder / model).glob(f"*zero_pp_rank_{self.rank}_*")
        hashed: dict[str, dict[str, Any]] = {}
        for file in (rng_file, *shards):
            name = str(file.relative_to(folder))
            hashed[name] = describe_file(file)
        torch.distributed.barrier()  # the caller may rename the folder after it
        return hashed

    def convert(self, model: ModelName, folder: Path) -> None:
        """Convert the checkpoint on rank 0, for a `load` by another number of ranks."""
        if self.rank == 0:
            zero3.convert_checkpoint(folder, model)

    def load(self, model: ModelName, folder: Path, universal: bool) -> None:
        """Load what `save` wrote, or with `universal` what `convert` wrote.

        With `universal` the RNG keeps this rank's seed. PPO and DPO draw no random numbers after `start`, and
        supervised training seeds the dropout of each step.
        """
        zero3.load_checkpoint(self.models[model].engine, folder, model, universal=universal)
        if not universal:
            rng_state = torch.load(self._rng_file(model, folder), weights_only=True)
            torch.set_rng_state(rng_state)

    def offload_states(self, model: ModelName) -> None:
        zero3.offload_states(self.models[model].engine)

    def reload_states(self, model: ModelName) -> None:
        zero3.reload_states(self.models[model].engine)

    def _rng_file(self, model: ModelName, folder: Path) -> Path:
        return folder / f"rng-{model}-{self.rank}.pt"


def _peak_gib(role: RoleConfig) -> float:
    """Return the peak GPU memory since its last reset; on a CPU that of the process since its start."""
    if role.gpus:
        return torch.cuda.max_memory_allocated() / 2**30
    peak_kib = getrusage(RUSAGE_SELF).ru_maxrss
    return 1024 * peak_kib / 2**30


LearnerActor = ray.remote(LearnerWorker)


class LearnerGroup:
    """The driver's side. Call `wait_ready` first. Every call has the timeout `learner.step_timeout_s`; see `collect`.

    After an exception the ranks may be in different states: call `close` and start again from a checkpoint.
    """

    actor: Any = LearnerActor  # class of a rank

    def __init__(
        self, spec: LearnerSpec, *, placement_timeout_s: float, placements: KeptPlacements | None = None
    ) -> None:
        """Start all ranks; their models load while the caller does other work. Raises UserError if they do not fit.

        Args:
            placements: Keeps the placement groups for the next group; without it `close` removes them.
        """
        self.spec = spec
        self.policy_version = 0  # increased when an update begins
        self._lock = threading.Lock()  # concurrent calls would reach the ranks in different orders
        self._running_call = ""
        self._lost: LearnerLost | RankFailed | None = None  # raised by every later call
        self.groups: list[Ranks] = []
        self.models: dict[ModelName, Ranks] = {}

        roles = spec.learner.roles(spec.objective)
        sections: dict[ModelName, str] = {"policy": "learner"}
        if spec.objective.uses_critic:
            sections["critic"] = [*roles][-1]
        try:
            for section, role in roles.items():
                names = [model for model, model_section in sections.items() if model_section == section]
                actor_name = "learner rank" if section == "learner" else "critic rank"
                environment = rank_environment(role, uses_cuda_ipc=spec.learner.uses_cuda_ipc)
                ranks = Ranks(
                    self.actor,
                    spec,
                    names,
                    section=section,
                    role=role,
                    actor_name=actor_name,
                    placements=placements,
                    placement_timeout_s=placement_timeout_s,
                    environment=environment,
                    memory_advice=advise("learner", spec.learner),
                    limit_s=spec.learner.step_timeout_s,
                )
                self.groups.append(ranks)
                self.models |= dict.fromkeys(names, ranks)
            self._starts = [(ranks, self._start(ranks)) for ranks in self.groups]
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: Ranks) -> list[Any]:
        address = ranks.workers[0].address.remote()  # a reference: the ranks take it when it is there
        return [worker.start.remote(address) for worker in ranks.workers]

    def wait_ready(self) -> None:
        """Wait until every rank has loaded its models. Raises UserError if a model cannot be loaded, or LearnerLost."""
        deadline = self._deadline()
        for ranks, refs in self._starts:
            ranks.collect(refs, "start", deadline)

    def _deadline(self) -> float:
        return time.monotonic() + self.spec.learner.step_timeout_s

    @contextmanager
    def _exclusive(self, call: str) -> Iterator[None]:
        timeout_s = self.spec.learner.step_timeout_s
        self._check_not_lost()
        if not self._lock.acquire(timeout=timeout_s):
            running = self._running_call
            raise LearnerLost(
                f"the learner timed out: {running} did not end within {timeout_s:g} s, so {call} could not begin"
            )
        self._running_call = call
        try:
            self._check_not_lost()  # the call that this one waited for may have lost a rank
            yield
        except (LearnerLost, RankFailed) as error:
            self._lost = error
            raise
        finally:
            self._lock.release()

    def _check_not_lost(self) -> None:
        """Raise the error of a lost group: ranks that hang would take every later call to its deadline again."""
        if self._lost is not None:
            raise self._lost

    def _on_models(
        self, models: Iterable[ModelName], call: str, submit: Callable[[Any, ModelName], Any]
    ) -> dict[ModelName, list[Any]]:
        """Call submit(worker, model) for all ranks of all models, then wait; return the results by rank."""
        with self._exclusive(call):
            deadline = self._deadline()
            refs: dict[ModelName, list[Any]] = {}
            for model in models:
                workers = self.models[model].workers
                refs[model] = [submit(worker, model) for worker in workers]

            results: dict[ModelName, list[Any]] = {}
            for model, model_refs in refs.items():
                ranks = self.models[model]
                results[model] = ranks.collect(model_refs, call, deadline)
            return results

    def _on_policy(self, call: str, submit: Callable[[Any], Any]) -> list[Any]:
        results = self._on_models(["policy"], call, lambda worker, model: submit(worker))
        return results["policy"]

    def _split(
        self, models: Iterable[ModelName], minibatches: Sequence[Sequence[TokenSequence]]
    ) -> tuple[dict[Any, Any], dict[Any, list[int]]]:
        """Return for each rank a reference to its rank batches, and its indices in the first minibatch."""
        rank_batches: dict[Any, Any] = {}
        indices: dict[Any, list[int]] = {}
        groups = {id(self.models[model]): self.models[model] for model in models}
        for ranks in groups.values():
            plans = [self.spec.plan(sequences, len(ranks)) for sequences in minibatches]
            for rank, worker in enumerate(ranks.workers):
                worker_batches: list[RankBatch] = []
                for sequences, plan in zip(minibatches, plans, strict=True):
                    rank_batch = select_rank_batch(sequences, plan[rank])
                    worker_batches.append(rank_batch)
                rank_batches[worker] = ranks.put(rank, worker_batches)
                indices[worker] = [*chain.from_iterable(plans[0][rank])]
        return rank_batches, indices

    def _in_order(self, model: ModelName, by_rank: Sequence[Stats], indices: Mapping[Any, Sequence[int]]) -> Stats:
        """Return the results of the ranks of a model in the order of the sequences."""
        workers = self.models[model].workers
        order = chain.from_iterable(indices[worker] for worker in workers)
        rows = chain.from_iterable(by_rank)
        by_index = dict(zip(order, rows, strict=True))
        return [by_index[index] for index in range(len(by_index))]

    def forward(self, sequences: Sequence[TokenSequence], fields: Collection[str] | None = None) -> list[TokenStats]:
        """Return old logprobs, reference logprobs, values and entropy, each [R], in the order of `sequences`.

        Args:
            fields: Names of the fields that are computed, by default `LearnerSpec.stats_fields`; others are 0.
        """
        requested = self.spec.stats_fields if fields is None else frozenset(fields)
        models: list[ModelName] = []
        if requested - {"values"}:
            models.append("policy")
        if "values" in requested and "critic" in self.models:
            models.append("critic")

        # Ranks need no texts.
        ids = [TokenIds(prompt_ids=row.prompt_ids, response_ids=row.response_ids) for row in sequences]
        rank_batches, indices = self._split(models, [ids])

        def submit(worker: Any, model: ModelName) -> Any:
            return worker.forward.remote(model, rank_batches[worker], requested)

        results = self._on_models(models, "forward", submit)
        rows = [make_zero_stats(sequence) for sequence in sequences]
        for model, by_rank in results.items():
            model_rows = self._in_order(model, by_rank, indices)
            for row, model_row in zip(rows, model_rows, strict=True):
                row.update(model_row)
        return [TokenStats(**row) for row in rows]

    def score_teacher(self, queries: Sequence[TeacherQuery]) -> list[TeacherStats]:
        """Return the log-probabilities of the frozen reference, in the order of `queries`."""
        rank_batches, indices = self._split(["policy"], [queries])
        results = self._on_policy("score_teacher", lambda worker: worker.score_teacher.remote(rank_batches[worker]))
        rows = self._in_order("policy", results, indices)
        return [TeacherStats(**row) for row in rows]

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Make every optimizer step of the batch; the policy skips the first `critic_warmup_steps` updates.

        Returns:
            Metrics as means over minibatches, by the names of `t2g.metrics`.

        Raises:
            Diverged: A loss or gradient is not finite; the message names model and minibatch. The step is not applied.
        """
        started = time.monotonic()
        skips_policy = self.policy_version < self.spec.warmup_updates
        models = [model for model in self.models if not (skips_policy and model == "policy")]
        rank_batches, indices = self._split(models, batch.minibatches)
        self.policy_version += 1
        label = f"update {self.policy_version}"
        kl_coef = batch.kl_coef

        def submit(worker: Any, model: ModelName) -> Any:
            return worker.update.remote(model, rank_batches[worker], kl_coef, label)

        try:
            results = self._on_models(models, "update", submit)
        except BaseException:
            self.policy_version -= 1
            raise

        stats: tuple[TokenStats, ...] = ()
        if self.spec.defers_old_logprobs:
            stats = self._last_update_stats(batch, indices)
            batch = with_old_logprobs(batch, stats)
        seconds = time.monotonic() - started

        metrics = merge_metrics(results.values())
        if self.spec.loss == "ppo":
            metrics |= correction_metrics(batch, self.spec.objective)
        num_tokens = sum(map(len, chain.from_iterable(batch.minibatches)))
        metrics[m.OPTIMIZER_STEPS] = float(len(batch.minibatches))
        metrics[m.LEARNER_SPEED] = num_tokens / seconds
        return UpdateResult(policy_version=self.policy_version, metrics=metrics, stats=stats)

    def _last_update_stats(self, batch: TrainBatch, indices: Mapping[Any, Sequence[int]]) -> tuple[TokenStats, ...]:
        """Return the statistics of each sample of an update with one step."""
        results = self._on_policy("last_update_stats", lambda worker: worker.last_update_stats.remote())
        rows = self._in_order("policy", results, indices)
        samples: Any = batch.minibatches[0]
        stats: list[TokenStats] = []
        for sample, row in zip(samples, rows, strict=True):
            sample_stats = TokenStats(**row, ref_logprobs=sample.ref_logprobs, values=sample.values)
            stats.append(sample_stats)
        return tuple(stats)

    def offload_states(self) -> None:
        """Move gradients and optimizer states to host memory.

        Call `reload_states` before the next update or save. Sending, scoring and exporting weights need no states.
        """
        self._on_models(self.models, "offload_states", lambda worker, model: worker.offload_states.remote(model))

    def reload_states(self) -> None:
        """Move gradients and optimizer states back to the device."""
        self._on_models(self.models, "reload_states", lambda worker, model: worker.reload_states.remote(model))

    def get_manifest(self) -> Shapes:
        """Return names and shapes of the policy in the order of `stream_weights`, without a gather."""
        by_rank = self._on_policy("get_manifest", lambda worker: worker.get_manifest.remote())
        return by_rank[0]

    def address(self) -> tuple[str, int]:
        """Return a host and port that rank 0 reserves for the rendezvous of the next `stream_weights`."""
        ranks = self.models["policy"]
        with self._exclusive("address"):
            ref = ranks.workers[0].address.remote()
            (address,) = ranks.collect([ref], "address", self._deadline())
            return address

    def stream_weights(
        self, dtype: Dtype, *, full: bool = False, rendezvous: Rendezvous | None = None
    ) -> Generator["ray.ObjectRef[Bucket]", None, None]:
        """Yield references to buckets in rank 0's object store; rank 0 gathers STREAM_AHEAD buckets in advance.

        With ipc it gathers one, and the next bucket may be requested once the engines have loaded the previous one.
        With nccl, rank 0 broadcasts a bucket after yielding it, and gets the next request once the engines have it.
        Other calls wait until the stream has ended, since its calls are collectives. Closing the iterator early does
        not wait; Ray then drops the other buckets.

        Args:
            full: Whether each bucket has a hash of every tensor.
            rendezvous: With nccl, that of rank 0 and the engines.
        """
        ranks = self.models["policy"]
        ahead = 1 if self.spec.learner.sync_transport == "ipc" else STREAM_AHEAD
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": ahead}
        with self._exclusive("stream_weights"):
            calls = [worker.stream_weights.options(**options) for worker in ranks.workers]
            streams = [call.remote(dtype, full, rendezvous) for call in calls]
            yield from self._buckets(ranks, streams)
            ends = [stream.completed() for stream in streams]
            ranks.collect(ends, "stream_weights", self._deadline())

    def _buckets(self, ranks: Ranks, streams: Sequence[Any]) -> Iterator["ray.ObjectRef[Bucket]"]:
        """Yield from rank 0's stream. If it fails, the ends of all streams together show the cause."""
        stream = streams[0]
        ends = [stream.completed() for stream in streams]
        poll_s = min(FAILURE_POLL_S, self.spec.learner.step_timeout_s)
        while True:
            deadline = self._deadline()
            while not ray.wait([stream], timeout=poll_s, fetch_local=False)[0]:
                if any_failed(ends[1:]) or time.monotonic() > deadline:
                    ranks.collect(ends, "stream_weights", deadline)  # raises
            try:
                ref = next(stream)
            except StopIteration:
                return
            if ray.wait(ends[:1], timeout=0)[0]:  # a stream that failed ends in a reference that raises
                ranks.collect(ends, "stream_weights", self._deadline())
            yield ref

    def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Return the logprobs of the probe, [N - 1] float32, at temperature 1; workers must return the same."""
        by_rank = self._on_policy("compute_probe_logprobs", lambda worker: worker.compute_probe_logprobs.remote(ids))
        return by_rank[0]

    def save(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Write model, optimizer, scheduler and RNG of every rank into an existing empty folder that all ranks share.

        Under LoRA the frozen weights are left out: a resume reads them from model.policy.
        """
        results = self._on_models(self.models, "save", lambda worker, model: worker.save.remote(model, folder))
        num_ranks = {model: len(ranks) for model, ranks in self.models.items()}
        state = {"num_updates": self.policy_version, "num_ranks": num_ranks}
        (folder / STATE_FILE).write_text(json.dumps(state))

        files: dict[str, dict[str, Any]] = {}
        for rank_files in chain.from_iterable(results.values()):
            files |= rank_files
        return files

    def load(self, folder: Path) -> None:
        """Load what `save` wrote; the next update continues exactly.

        A model that another number of ranks wrote is first converted (`zero3.convert_checkpoint`), into a temporary
        folder beside it.
        """
        state = json.loads((folder / STATE_FILE).read_text())
        saved_ranks = state["num_ranks"]
        resized = [model for model, ranks in self.models.items() if saved_ranks[model] != len(ranks)]
        try:
            self._on_models(resized, "convert", lambda worker, model: worker.convert.remote(model, folder))
            self._on_models(
                self.models, "load", lambda worker, model: worker.load.remote(model, folder, model in resized)
            )
        finally:
            for model in resized:
                converted = zero3.universal_folder(folder, model)
                shutil.rmtree(converted, ignore_errors=True)
        self.policy_version = state["num_updates"]

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder in safetensors with its tokenizer, and under LoRA its adapter."""
        self._on_policy("export", lambda worker: worker.export.remote(folder))

    def close(self) -> None:
        """Kill the ranks, and remove their placement groups unless they are kept. Safe to call twice."""
        for ranks in self.groups:
            ranks.close()
