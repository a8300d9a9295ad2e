"""Load received LoRA adapters into an engine, through an adapter file that vLLM reads.

vLLM's weight transfer covers the model's own weights only, and drops all adapters at its end. Adapters are therefore
loaded with `add_lora`.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from actors.weights.buckets import Bucket, hash_arrays
from t2g.config import LoRAConfig

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of max_lora_rank in vLLM 0.32
ADAPTER_ID = 1  # id of the only adapter: a running request continues with the adapter that is next loaded under this id


def find_targets(model: Any) -> list[str]:
    """Return the paths of the layers that get an adapter: every linear layer but the head.

    The experts of a mixture, and every other linear layer in a block that has experts, get none: the experts are one
    tensor, no layer.

    Args:
        model: A transformers PreTrainedModel, also an empty one.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    blocks = find_expert_blocks(model)
    targets: list[str] = []
    for path, layer in model.named_modules():
        is_linear = isinstance(layer, torch.nn.Linear | Conv1D) and layer is not head
        if is_linear and not blocks.intersection(path.split(".")):
            targets.append(path)
    return targets


def find_expert_blocks(model: torch.nn.Module) -> set[str]:
    """Return the names, without their paths, of the blocks that have experts as one tensor [experts, out, in].

    >>> experts = torch.nn.Module()
    >>> experts.down_proj = torch.nn.Parameter(torch.zeros(4, 8, 6))
    >>> mlp = torch.nn.ModuleDict({"experts": experts})
    >>> find_expert_blocks(torch.nn.ModuleDict({"mlp": mlp, "conv": torch.nn.Conv1d(1, 1, 1)}))
    {'mlp'}
    """
    blocks: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            continue
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            blocks.update(path.split(".")[-2:-1])
    return blocks


def load_empty(model: str, revision: str | None) -> Any:
    """Return the model without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model, revision=revision)
        return AutoModelForCausalLM.from_config(config)


def engine_arguments(lora: LoRAConfig, model: str, revision: str | None) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter on the layers of `find_targets`.

    With an adapter on the head, an engine that computes prompt logprobs along with other requests dies (vLLM 0.32).
    """
    paths = find_targets(load_empty(model, revision))
    names = {path.rpartition(".")[2] for path in paths}
    max_rank = min((rank for rank in MAX_LORA_RANKS if rank >= lora.r), default=lora.r)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": max_rank,
        "lora_target_modules": sorted(names),
    }


class Adapters:
    """The adapters of one version, by the names of `actors.learner.lora.adapter_name`."""

    def __init__(self, lora: LoRAConfig, names: Iterable[str], dtype: str, version: int) -> None:
        self._lora = lora
        self._names = set(names)
        self._dtype = getattr(torch, dtype)
        self._version = version
        self._buckets: dict[int, tuple[Sequence[str], str]] = {}  # names, and the learner's hash of their bytes
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, bucket: Bucket) -> None:
        """Add one bucket, in any order."""
        self._buckets[bucket.index] = bucket.names, bucket.transport_meta["xxh3"]
        for name, array in zip(bucket.names, bucket.tensors, strict=True):
            self._tensors[name] = torch.from_numpy(array.copy()).view(self._dtype)

    def write(self, folder: Path) -> None:
        """Write the adapter as peft does.

        Raises:
            ValueError: The names differ from the manifest, or the bytes from those that were sent.
        """
        from safetensors.torch import load_file, save_file

        wrong_names = self._names ^ self._tensors.keys()
        if wrong_names:
            reason = f"{len(wrong_names)} tensors are missing, or not in the manifest ({min(wrong_names)})"
            raise ValueError(f"adapters of version {self._version} are refused: {reason}")
        config = {"r": self._lora.r, "lora_alpha": self._lora.alpha, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(config))

        file = folder / "adapter_model.safetensors"
        save_file(self._tensors, file)
        stored = load_file(file)
        for index, (names, expected) in self._buckets.items():
            arrays = (stored[name].reshape(-1).view(torch.uint8).numpy() for name in names)
            if hash_arrays(*arrays) != expected:
                raise ValueError(f"xxh3 mismatch: bucket {index} of version {self._version} changed in transfer")

    async def load(self, llm: Any) -> Any:
        """Replace the adapter of the engine, an AsyncLLM; return the LoRARequest that its requests must name."""
        from vllm.lora.request import LoRARequest

        with TemporaryDirectory(prefix="t2g-adapter-") as folder:
            await asyncio.to_thread(self.write, Path(folder))
            await llm.add_lora(LoRARequest("policy", ADAPTER_ID, folder, load_inplace=True))
            return LoRARequest("policy", ADAPTER_ID, folder)
