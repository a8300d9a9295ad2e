"""The model folder of a trained policy: write it, then read it back in plain transformers and compare.

transformers loads a folder with missing weights and gives them new values. So a folder counts as written only when it
loads without a missing or unexpected weight, and gives the logprobs of the model that it was written from.
"""

import gc
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.cluster.fanout import first_line
from actors.learner.models import ABSENT
from actors.weights.probe import MEDIAN_SHARE, PROBE_TOKENS, SLACK, Gap, compute_gap, make_probe_ids
from t2g.algo import shared_attention
from t2g.config import Dtype, ModelConfig
from t2g.errors import RunStopped
from t2g.files import match_folder_permissions, write_json

GENERATION_FILE = "generation_config.json"
EXPORT_FILE = "t2g_export.json"  # the gap of the probe, in each exported folder
MAX_NAMES = 3  # in messages


def write_model(
    model: Any, tokenizer: Any, weights: Mapping[str, torch.Tensor] | None, folder: Path, source: ModelConfig
) -> None:
    """Write a Hugging Face folder in safetensors with its tokenizer.

    The source's generation_config.json is copied unchanged: transformers refuses to save one that it calls invalid, as
    a temperature without do_sample.

    Args:
        model: A transformers PreTrainedModel, whose config is written.
        weights: By the names of the model's files, see `full_weights.to_file_layout`; None for those of `model`.
    """
    with _valid_generation_config(model) as own_config:
        if weights is None:
            model.save_pretrained(folder)
        else:
            model.save_pretrained(folder, state_dict=dict(weights), save_original_format=False)
    tokenizer.save_pretrained(folder)
    (folder / GENERATION_FILE).unlink(missing_ok=True)
    source_file = _find_generation_config(source)
    if source_file is not None:
        shutil.copyfile(source_file, folder / GENERATION_FILE)
    elif own_config is not None:
        own_config.to_json_file(folder / GENERATION_FILE)  # does not check it
    match_folder_permissions(folder)


@contextmanager
def _valid_generation_config(model: Any) -> Iterator[Any]:
    """Give the model a generation config that transformers saves, within the block; yield its own, or None."""
    from transformers import GenerationConfig

    generation_config = model.generation_config if model.can_generate() else None
    if generation_config is None:
        yield None
        return
    model.generation_config = GenerationConfig()
    try:
        yield generation_config
    finally:
        model.generation_config = generation_config


def _find_generation_config(source: ModelConfig) -> str | None:
    from transformers.utils import cached_file

    return cached_file(
        source.policy,
        GENERATION_FILE,
        revision=source.revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def check_folder(
    folder: Path, ids: np.ndarray, expected: np.ndarray, *, like: Any, dtype: Dtype, tolerance: float
) -> Gap:
    """Read an exported folder back, and return its gap from the model that it was written from.

    EXPORT_FILE of the folder holds the gap, too.

    Args:
        ids: [N] int32 of the probe.
        expected: [N - 1] float32, the model's logprobs of the probe.
        like: The transformers model that was written; its attention is used.
        tolerance: The difference in nats that rounding explains. The median may be SLACK * MEDIAN_SHARE of it.

    Raises:
        RunStopped: A weight is missing or unexpected, or the logprobs differ. The folder is removed.
    """
    limit = SLACK * MEDIAN_SHARE * tolerance
    try:
        gap = _score_folder(folder, ids, expected, like=like, dtype=dtype)
        if gap.median > limit:
            raise RunStopped(
                f"the model written to {folder} is not the trained one: the median difference of {len(expected)} "
                f"logprobs is {gap.median:.3g} nats, above {limit:.3g}; in PPO, learner.probe_tolerance "
                "allows for adapters that are rounded when they are merged into bfloat16 weights"
            )
    except RunStopped:
        shutil.rmtree(folder)
        raise
    report = {"probe_gap": asdict(gap), "probe_tokens": len(ids)}
    write_json(folder / EXPORT_FILE, report)
    match_folder_permissions(folder)
    return gap


def _score_folder(folder: Path, ids: np.ndarray, expected: np.ndarray, *, like: Any, dtype: Dtype) -> Gap:
    import transformers

    attention = like.config._attn_implementation
    if attention == shared_attention.NAME:
        attention = "sdpa"
    options = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": attention,
        "use_safetensors": True,
        "trust_remote_code": False,
        "output_loading_info": True,
    }
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise RunStopped(f"the model written to {folder} cannot be loaded: {first_line(error)}") from error
    missing = set(info["missing_keys"]) - getattr(like, ABSENT, frozenset())
    unexpected = info["unexpected_keys"]
    for problem, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            weights = f"{len(names)} weights: {_format_names(names)}"
            raise RunStopped(f"the model written to {folder} {problem} {weights}")
    logprobs = score(model.eval(), ids)
    del model
    gc.collect()
    return compute_gap(logprobs, expected)


@torch.no_grad()
def score(model: Any, ids: np.ndarray) -> np.ndarray:
    """Return [N - 1] float32: log softmax(logits)[ids[t + 1]] after ids[: t + 1], by a plain transformers model."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    outputs = model(input_ids=tokens[None], use_cache=False)
    logits = outputs.logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])
    return logprobs[:, 0].numpy()


def default_probe(model: Any) -> np.ndarray:
    """Return [N] int32: random tokens, for an export that no weight sync preceded."""
    config = model.config.get_text_config()
    window = getattr(config, "max_position_embeddings", None) or PROBE_TOKENS
    return make_probe_ids([], config.vocab_size, min(PROBE_TOKENS, window))


def _format_names(names: Any) -> str:
    first = sorted(names)[:MAX_NAMES]
    text = ", ".join(first)
    num_more = len(names) - len(first)
    return f"{text} and {num_more} more" if num_more else text
