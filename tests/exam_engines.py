"""A fleet of one engine around a torch model, and its learner: the real weight sync between two kernels.

The engine computes with the kernel "eager", the learner with "sdpa". A fault is planted in the engine.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from actors.learner import lora
from actors.weights.adapters import Adapters
from actors.weights.buckets import Bucket, Rendezvous, Shapes, make_bucket, plan_buckets
from actors.weights.probe import Gap
from actors.weights.sync import FleetWeightSync
from t2g.config import HealthConfig, LearnerConfig, LoRAConfig, ModelConfig, RolloutConfig
from t2g.errors import MissedSync
from t2g.types import WeightSyncResult

LORA = LoRAConfig(r=4, alpha=12)
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCAB_SIZE = 300
BUCKET_BYTES = 2**16
Tensors = Mapping[str, torch.Tensor]


def make_model(kernel: str) -> LlamaForCausalLM:
    """Return the checkpoint that both sides load."""
    config = LlamaConfig(vocab_size=VOCAB_SIZE, initializer_range=0.15, attn_implementation=kernel, **SHAPE)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def compute_logprobs(model: Any, ids: np.ndarray) -> np.ndarray:
    """Return the log-probability of each token after those before it, [N - 1] float32."""
    tokens = torch.tensor(ids, dtype=torch.long)
    logits = model(tokens[None]).logits[0, :-1].float()
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), tokens[1:]].numpy()


class Remote:
    """A method of an actor as Ray shows it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class TorchEngine:
    """An engine whose `fault` changes the tensors of a version before they are loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # of adapter files
        self.model = make_model("eager")
        self.fault: Callable[[dict[str, torch.Tensor]], Tensors] = lambda tensors: tensors
        self.wakes_with_old_tensors = False
        self.lora: LoRAConfig | None = None
        self.name = "w0"
        self.handle = self
        self.syncing = False
        self.version: int | None = None
        self.has_begun_update = False
        self.open_update = Remote(self._open)
        self.load_bucket = Remote(self._load)
        self.close_update = Remote(self._close)
        self.compute_logprobs = Remote(self._score)
        self.sleep = Remote(self._sleep)
        self.wake_up = Remote(self._wake_up)

    async def _open(self, round_id: str, version: int, dtype: str, shapes: Shapes) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.adapters = None if self.lora is None else Adapters(self.lora, shapes, dtype, version)

    async def _load(self, round_id: str, bucket: Bucket) -> dict[str, float]:
        tensors = dict(zip(bucket.names, map(torch.from_numpy, bucket.tensors), strict=True))
        if self.adapters is not None:
            self.adapters.add(bucket)
        self.received |= tensors
        return {"gather": 0.0, "copy_to_core": 0.0, "load": 0.0}

    async def _close(self, round_id: str) -> None:
        if self.adapters is not None:
            self.adapters.write(self.folder)
            stored = load_file(self.folder / "adapter_model.safetensors")
            self.received = merge_adapters(make_model("eager"), stored)
        tensors = self.fault(self.received)
        self.model.load_state_dict(dict(tensors), strict=False)

    async def _score(self, ids: np.ndarray) -> np.ndarray:
        return compute_logprobs(self.model, ids)

    async def _sleep(self) -> None:
        self.backup = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    async def _wake_up(self) -> None:
        """Restore the weights; with the fault, requests go on with them whatever is loaded later."""
        if self.wakes_with_old_tensors:
            self.fault = lambda tensors: self.backup


def merge_adapters(model: Any, adapters: Tensors) -> dict[str, torch.Tensor]:
    """Return the weights of the layers with an adapter, merged: W + alpha / r x B A."""
    merged = {}
    for name, first in adapters.items():
        path, is_first, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if is_first:
            second = adapters[name.replace(".lora_A.", ".lora_B.")]
            weight = model.get_parameter(f"{path}.weight").detach()
            merged[f"{path}.weight"] = weight + LORA.alpha / LORA.r * second @ first
    return merged


class TorchLearner:
    """Sends its weights, or with `lora` its adapters."""

    def __init__(self, *, with_adapters: bool = False) -> None:
        self.model = make_model("sdpa")
        self.policy_version = 0
        named = self.model.named_parameters()
        if with_adapters:
            lora.add_adapters(self.model, LORA, ModelConfig(policy="unused"), dropout=0.0)
            named = ((lora.adapter_name(name), weight) for name, weight in self.model.named_parameters())
        self.weights = {name: weight.detach() for name, weight in named if name is not None}
        self.sent = self.weights

    def move(self, scale: float) -> None:
        """Update every weight."""
        generator = torch.Generator().manual_seed(self.policy_version)
        self.policy_version += 1
        for weight in self.weights.values():
            weight += scale * torch.randn(weight.shape, generator=generator)

    def get_manifest(self) -> Shapes:
        return {name: tuple(weight.shape) for name, weight in self.weights.items()}

    def stream_weights(self, dtype: str, *, full: bool, rendezvous: Rendezvous | None) -> Iterator[Bucket]:
        shapes = {name: tuple(weight.shape) for name, weight in self.sent.items()}
        for index, names in enumerate(plan_buckets(shapes, dtype=dtype, bucket_bytes=BUCKET_BYTES)):
            tensors = [self.sent[name].numpy() for name in names]
            yield make_bucket(index, names, tensors, full=full, started=time.monotonic())

    def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        return compute_logprobs(self.model, ids)

    def offload_states(self) -> None:
        """The states lie in host memory already."""

    def reload_states(self) -> None:
        """As `offload_states`."""


class OneEngine:
    """The fleet."""

    config = RolloutConfig(max_model_len=96, max_new_tokens=8, health=HealthConfig())
    vocab_size = VOCAB_SIZE
    gpu_user = "engines"
    is_starting = False
    baseline_gap: Gap | None = None

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    def describe_workers(self) -> str:
        return "the engine is up"

    def begin_sync(self) -> list[TorchEngine]:
        return [self.engine]

    def started(self) -> list[TorchEngine]:
        return [self.engine]

    async def replace_unreachable(self) -> None: ...

    async def request(self, worker: TorchEngine, submit: Callable[[Any], Any], what: str) -> Any:
        try:
            return await submit(worker.handle)
        except ValueError as error:
            raise MissedSync(f"refused {what}: {error}") from error

    def record_verified(self, worker: TorchEngine, version: int) -> None:
        worker.version = version

    def record_missed_sync(self, worker: TorchEngine, reason: str, *, timed_out: bool = False) -> None:
        """The sync names the reason."""

    def record_aborted_sync(self, worker: TorchEngine, reason: str) -> None:
        """As `record_missed_sync`."""


class SyncedPair:
    """An engine and a learner that have agreed on the checkpoint."""

    def __init__(self, folder: Path, *, with_adapters: bool = False) -> None:
        self.engine = TorchEngine(folder)
        self.engine.lora = LORA if with_adapters else None
        self.learner = TorchLearner(with_adapters=with_adapters)
        self.fleet = OneEngine(self.engine)
        config = LearnerConfig(lora=LORA if with_adapters else None)
        self.sync = FleetWeightSync(self.learner, self.fleet, config)
        self.push()

    def push(self) -> WeightSyncResult:
        return asyncio.run(self.sync.push(self.learner.policy_version))
