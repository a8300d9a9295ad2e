"""Low-rank adapters (Hu et al., arXiv 2106.09685): added by peft, and merged and renamed here.

A weight W [out, in] with an adapter computes W x + scaling * B (A dropout(x)), scaling = alpha / r. Exported weights
have checkpoint names and are merged, as if all weights had been trained. This module does not know DeepSpeed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from actors.cluster.fanout import first_line
from actors.learner.export import write_model
from actors.learner.models import load_for_training
from actors.weights.adapters import find_expert_blocks, find_targets, load_empty
from t2g.config import Dtype, LoRAConfig, ModelConfig
from t2g.errors import UserError
from t2g.text.tokenizer import load_tokenizer

ADAPTER = "default"  # peft's name of the only adapter
FOLDER = "adapter"  # in the folder of the merged model
WEIGHTS = "adapter_model.safetensors"
_BASE = ".base_layer."
_FACTORS = (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")


def add_adapters(model: Any, lora: LoRAConfig, base: ModelConfig, *, dropout: float) -> None:
    """Freeze `model` and add an adapter to the layers of `find_targets`, in place. Its outputs stay the same.

    Args:
        model: A transformers PreTrainedModel.
        base: Its source, which the exported adapter names.

    Raises:
        UserError: peft adapts a layer in a form that cannot be merged and sent.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=find_targets(model),
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=dropout,
        base_model_name_or_path=base.policy,
        revision=base.revision,
    )
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        message = first_line(error)
        raise UserError(
            f"lora: peft cannot adapt model.policy={base.policy!r}: {message}; train all weights"
        ) from error
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and not isinstance(layer, Linear):
            raise UserError(
                f"lora: peft adapts {name} of model.policy={base.policy!r} as a {type(layer).__name__}, which can be "
                "neither merged nor sent to an engine; train all weights of this model"
            )
    # ZeRO-3 fetches a layer's weights in the backward pass by its input's gradient, which the first layer lacks.
    model.enable_input_require_grads()


def check_adapters(lora: LoRAConfig, base: ModelConfig, *, cpu_engines: bool = False) -> None:
    """Check before any process is started that the model can be trained with adapters.

    Args:
        cpu_engines: Whether engines on CPUs load the adapters.

    Raises:
        UserError: See `add_adapters`, or vLLM cannot load adapters for a mixture of experts on a CPU.
    """
    empty = load_empty(base.policy, base.revision)
    if cpu_engines and find_expert_blocks(empty):
        raise UserError(
            f"learner.lora: model.policy={base.policy!r} is a mixture of experts, and vLLM loads adapters of those on "
            "GPUs only; set learner.sync_adapters=false, which sends merged weights"
        )
    with torch.device("meta"):
        add_adapters(empty, lora, base, dropout=0.0)


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Disable the adapters within the block, for passes without gradient."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def map_weight_sources(names: Iterable[str], *, adapters: bool = False) -> dict[str, tuple[str, ...]]:
    """Map the checkpoint's name of each weight to the model's names: (own,), or (frozen weight, A, B) with an adapter.

    With `adapters`, only the weights of adapters, by `adapter_name`.

    >>> map_weight_sources(["q.base_layer.weight", "q.lora_A.default.weight", "q.lora_B.default.weight"])
    {'q.weight': ('q.base_layer.weight', 'q.lora_A.default.weight', 'q.lora_B.default.weight')}
    """
    mapping: dict[str, tuple[str, ...]] = {}
    for name in names:
        if adapters:
            renamed = adapter_name(name)
            if renamed:
                mapping[renamed] = (name,)
            continue
        if name.endswith(_FACTORS):
            continue
        module, is_under, kind = name.rpartition(_BASE)
        if not is_under:
            mapping[name] = (name,)
        elif kind == "weight":
            factors = (module + factor for factor in _FACTORS)
            mapping[f"{module}.weight"] = (name, *factors)
        else:
            mapping[f"{module}.{kind}"] = (name,)  # a bias has no adapter
    return mapping


def merged_weight(weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return weight + scaling * lora_b @ lora_a, computed in float32, in the type of `weight`.

    weight [out, in]; lora_a [r, in]; lora_b [out, r]; scaling = alpha / r.
    """
    merged = torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scaling)
    return merged.to(weight.dtype)


def checkpoint_weight(model: torch.nn.Module, name: str, parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the checkpoint's tensor `name`; parts: the full tensors of `map_weight_sources(...)[name]`."""
    weight, *factors = (part.detach() for part in parts)
    if not factors:
        return weight
    lora_a, lora_b = factors
    layer = model.get_submodule(name.removesuffix(".weight"))
    scaling = layer.scaling[ADAPTER]
    if layer.fan_in_fan_out:  # GPT-2's Conv1D keeps its weight as [in, out]
        return merged_weight(weight, lora_b.T, lora_a.T, scaling)
    return merged_weight(weight, lora_a, lora_b, scaling)


def adapter_name(name: str) -> str | None:
    """Return the name of a weight in an adapter file; None if the weight is not part of an adapter.

    >>> adapter_name("model.q.lora_A.default.weight")
    'base_model.model.model.q.lora_A.weight'
    """
    if not name.endswith(_FACTORS):
        return None
    matrix = name.removesuffix(f".{ADAPTER}.weight")
    return f"base_model.model.{matrix}.weight"


def write_adapter(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter only, in the format of peft and vLLM. weights: by `adapter_name`, on the CPU."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / WEIGHTS, metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(folder)


def merge_adapter(adapter: Path, folder: Path, dtype: Dtype) -> None:
    """Merge an adapter into the base model that it names; write a model folder with a tokenizer.

    The tokenizer and its chat template are the adapter's own if it has them, else those of the base. A base whose
    embeddings the training resized is resized as well.

    Raises:
        UserError: The adapter has no safetensors (pickles are not read), or its base cannot be loaded.
    """
    from peft import PeftConfig, PeftModel

    if not (adapter / WEIGHTS).is_file():
        raise UserError(f"{adapter} has no {WEIGHTS}; save the adapter in that format")
    config = PeftConfig.from_pretrained(adapter)
    base = ModelConfig(policy=str(config.base_model_name_or_path), revision=config.revision)
    tokenizer, (model,) = load_for_training(base, "AutoModelForCausalLM", dtype=dtype, on_gpu=False)
    if (adapter / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(str(adapter))
    num_rows = _count_rows(adapter, model)
    if num_rows is not None:
        model.resize_token_embeddings(num_rows, mean_resizing=False)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    part = folder.with_name(f"{folder.name}.part")
    write_model(merged, tokenizer, None, part, base)
    part.rename(folder)


def _count_rows(adapter: Path, model: Any) -> int | None:
    """Return the rows of the embeddings or the head in an adapter's file; None if it has neither."""
    from safetensors import safe_open

    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f"base_model.model.{name}.weight" for name, module in model.named_modules() if module in tables]
    with safe_open(adapter / WEIGHTS, "pt") as file:
        stored = set(file.keys())
        for name in names:
            if name in stored:
                num_rows, *_ = file.get_slice(name).get_shape()
                return num_rows
    return None
