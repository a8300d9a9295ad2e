"""Weights from the learner group into every rollout engine: sent by version, checked by names, proved by a probe.

The way of one version: the learner announces names and shapes, streams buckets through Ray's object store, and every
worker writes each bucket into memory that its engine maps (`actors.arena`, `actors.vllm_plugin`). vLLM does not
notice a bad sync, so after each one every worker scores the same 64 tokens and must agree with the learner.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayTaskError

from t2g.errors import RunStopped
from t2g.sections import LearnerConfig
from t2g.types import WeightSyncResult

logger = logging.getLogger(__name__)

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
PROBE_TOKENS = 64
PROBE_SEED = 20250522


@dataclass(frozen=True, kw_only=True)
class ParamMeta:
    """What is announced of one tensor before any byte is sent. Tied weights are announced and sent once."""

    name: str  # as in the Hugging Face checkpoint
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Whole modules of one version, in announced order. bfloat16 travels as its bits in uint16."""

    index: int  # 0, 1, ... within a sync
    names: tuple[str, ...]
    tensors: tuple[np.ndarray, ...]  # C-contiguous, float32, or uint16 for bfloat16; shapes as announced


class WeightOwner(Protocol):
    """What the learner group offers to a weight sync."""

    def announce(self) -> Sequence[ParamMeta]:
        """Every parameter of the policy in the order in which it is sent, without gathering any."""
        ...

    def stream_weights(self, dtype: str) -> Generator["ray.ObjectRef[Bucket]", None, None]:
        """Buckets as `plan_buckets` cuts them; tensors converted to `dtype` ("float32" or "bfloat16")."""
        ...

    def probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[N - 1] float32: log softmax(logits)[ids[t + 1]] after ids[: t + 1], at temperature 1 as `Engine.score`."""
        ...


def module_key(name: str) -> str:
    """The part of a model that must travel in one bucket: a whole decoder layer, else the module that owns the tensor.

    >>> module_key("model.layers.3.self_attn.q_proj.weight"), module_key("model.layers.3.mlp.experts.7.w1")
    ('model.layers.3', 'model.layers.3')
    >>> module_key("model.embed_tokens.weight")
    'model.embed_tokens'
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def plan_buckets(metas: Sequence[ParamMeta], *, dtype: str, bucket_bytes: float) -> list[tuple[str, ...]]:
    """Names of each bucket, in announced order: whole modules, at most `bucket_bytes` unless one module is larger.

    A bucket never ends inside a module: the engine fuses q, k, v (and gate, up) into one tensor and keeps references
    to the first parts until the last has come; the arena they lie in would be overwritten by the next bucket.
    """
    sizes: dict[str, int] = {}
    members: dict[str, list[str]] = {}
    for meta in metas:
        key = module_key(meta.name)
        sizes[key] = sizes.get(key, 0) + int(np.prod(meta.shape)) * ITEM_BYTES[dtype]
        members.setdefault(key, []).append(meta.name)
    buckets: list[tuple[str, ...]] = []
    filled = 0
    for key, names in members.items():
        if buckets and filled + sizes[key] <= bucket_bytes:
            buckets[-1] += tuple(names)
            filled += sizes[key]
        else:
            buckets.append(tuple(names))
            filled = sizes[key]
    return buckets


class EngineFleet(Protocol):
    """What a weight sync needs of `actors.rollout.RolloutFleet`."""

    vocab_size: int
    dtype: str
    max_model_len: int

    def on_all(self, submit: Callable[[Any], Any], *, timeout_s: float, what: str) -> dict[str, Any]: ...


class StoreWeightSync:
    """Implements `t2g.interfaces.WeightSync` over the object store. `push` returns only when every worker agrees."""

    def __init__(self, learner: WeightOwner, fleet: EngineFleet, config: LearnerConfig) -> None:
        self._learner, self._fleet, self._config = learner, fleet, config
        self._probe = probe_ids(fleet.vocab_size, min(PROBE_TOKENS, fleet.max_model_len - 1))

    def push(self, policy_version: int) -> WeightSyncResult:
        """Send, prove, and send again whole if the proof fails. Raises RunStopped when it fails twice, when a worker
        refuses the weights, or when none answers in `learner.step_timeout_s`.
        """
        started = time.monotonic()
        for _ in range(2):
            deadline = time.monotonic() + self._config.step_timeout_s
            num_bytes = self._send(policy_version, deadline)
            worker, gap = self._worst_gap(deadline)
            if gap <= self._config.probe_tolerance:
                return WeightSyncResult(
                    policy_version=policy_version,
                    seconds=time.monotonic() - started,
                    bytes=num_bytes,
                    probe_gap=gap,
                )
            logger.warning("%s is %.3g nats off on the probe of version %d", worker, gap, policy_version)
        raise RunStopped(
            f"{worker} does not compute what the learner computes: {gap:.3g} nats apart on the probe of "
            f"{len(self._probe)} tokens after version {policy_version} was sent twice; at most "
            f"learner.probe_tolerance={self._config.probe_tolerance:g} is allowed"
        )

    def _send(self, version: int, deadline: float) -> int:
        """All buckets into all workers; returns the bytes sent to each. The learner gathers the next bucket while the
        workers load the present one."""
        metas, dtype = list(self._learner.announce()), self._fleet.dtype
        num_bytes = 0
        try:
            self._on_all(lambda w: w.open_update.remote(version, dtype, metas), deadline, "the start of a weight sync")
            # Closed here and now: left to the garbage collector, the stream would be ended after Ray is.
            with closing(self._learner.stream_weights(dtype)) as stream:
                for ref in stream:
                    loaded = self._on_all(
                        lambda w, ref=ref: w.load_bucket.remote(version, ref), deadline, "a bucket of weights"
                    )
                    num_bytes += next(iter(loaded.values()))
            self._on_all(lambda w: w.close_update.remote(version), deadline, "the end of a weight sync")
        except RayTaskError as error:
            raise RunStopped(f"weight sync of version {version} refused: {error.cause}") from error
        return num_bytes

    def _worst_gap(self, deadline: float) -> tuple[str, float]:
        """The worker whose probe is furthest from the learner's, and how far: nats, inf where one is no number."""
        want = self._learner.probe_logprobs(self._probe)
        got = self._on_all(lambda w: w.score.remote(self._probe), deadline, "the probe")
        gaps = {name: probe_gap(scores, want) for name, scores in got.items()}
        return max(gaps.items(), key=lambda item: item[1])

    def _on_all(self, submit: Callable[[Any], Any], deadline: float, what: str) -> dict[str, Any]:
        return self._fleet.on_all(submit, timeout_s=max(0.0, deadline - time.monotonic()), what=what)


def probe_ids(vocab_size: int, num_tokens: int) -> np.ndarray:
    """[N] int32: the same random tokens in every sync of every run with this vocabulary."""
    return np.random.default_rng(PROBE_SEED).integers(0, vocab_size, num_tokens, dtype=np.int32)


def probe_gap(engine: np.ndarray, learner: np.ndarray) -> float:
    """Largest |engine - learner| over the probe, nats; inf when a value is NaN or infinite: no bound would catch it.

    >>> probe_gap(np.array([-1.0, -2.0]), np.array([-1.0, -2.5])), probe_gap(np.array([np.nan]), np.array([-1.0]))
    (0.5, inf)
    """
    gap = float(np.max(np.abs(engine - learner)))
    return gap if np.isfinite(gap) else float("inf")
