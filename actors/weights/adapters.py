"""LoRA's adapters on their way into an engine, as a file of the kind that vLLM reads for a request that names it.

vLLM's weight transfer is of the model's own weights, and forgets all adapters when it ends; so they come by `add_lora`.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from actors.weights.buckets import Bucket, hash_of
from t2g.config import LoRAConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 has room for
NUMBER = 1  # vLLM's of the only adapter: a request under way goes on with what is next loaded as the same


def engine_arguments(lora: LoRAConfig, model: str, revision: str | None) -> dict[str, Any]:
    """Of vLLM: room for one adapter, on every linear layer but the head. A head with one would kill an engine that is
    computes prompt logprobs, as for a probe, beside other requests (vLLM 0.32)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, revision=revision))
    layers = [(n, m) for n, m in empty.named_modules() if isinstance(m, torch.nn.Linear)]
    targets = sorted({name.rpartition(".")[2] for name, layer in layers if layer is not empty.get_output_embeddings()})
    rank = min((n for n in RANKS if n >= lora.r), default=lora.r)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": targets}


class Adapters:
    """One version, bucket by bucket; names as `actors.learner.lora.adapter_name` has them."""

    def __init__(self, lora: LoRAConfig, names: Iterable[str], dtype: str, version: int) -> None:
        self._lora, self._names, self._dtype, self._version = lora, set(names), getattr(torch, dtype), version
        self._buckets: dict[int, tuple[Sequence[str], str]] = {}  # names, and the learner's hash of their bytes
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, bucket: Bucket) -> None:
        """One bucket; they come in any order."""
        self._buckets[bucket.index] = bucket.names, bucket.way["xxh3"]
        for name, array in zip(bucket.names, bucket.tensors, strict=True):
            self._tensors[name] = torch.from_numpy(array.copy()).view(self._dtype)

    def write(self, folder: Path) -> None:
        """As peft would. Raises ValueError when other names came than were announced, or other bytes than were sent."""
        from safetensors.torch import load_file, save_file

        if wrong := self._names ^ self._tensors.keys():
            sentence = f"{len(wrong)} tensors never came, or were not announced ({min(wrong)})"
            raise ValueError(f"adapters of version {self._version} are refused: {sentence}")
        config = {"r": self._lora.r, "lora_alpha": self._lora.alpha, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(self._tensors, file := folder / "adapter_model.safetensors")
        stored = load_file(file)
        for index, (names, expected) in self._buckets.items():
            if hash_of(*(stored[name].reshape(-1).view(torch.uint8).numpy() for name in names)) != expected:
                raise ValueError(f"bucket {index} of version {self._version} arrived with other bytes")

    async def load(self, llm: Any) -> Any:
        """Have the engine, an AsyncLLM, take them in place of those before; returns what its requests must name."""
        from vllm.lora.request import LoRARequest

        with TemporaryDirectory(prefix="t2g-adapter-") as folder:
            await asyncio.to_thread(self.write, Path(folder))
            await llm.add_lora(LoRARequest("policy", NUMBER, folder, load_inplace=True))
            return LoRARequest("policy", NUMBER, folder)  # a request that did not find them loaded would fail
