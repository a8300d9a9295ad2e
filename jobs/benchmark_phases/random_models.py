"""Models with random weights whose responses are as long as the benchmark wants, and their prompts.

A channel of the residual stream holds one number that no layer changes; the output head reads from it how likely the
end of a response is. So bare engines, the fleet and TRL all write responses of the same lengths, and none needs a
setting that another lacks.
"""

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from t2g.config import BenchmarkJob, ShapeConfig
from t2g.errors import UserError
from t2g.types import Prompt

WORDS = 2000  # words of random letters, from which the tokenizer learns its pieces
NEVER = -30.0  # logit of an end that does not come
CONSTANT = 1.0
MIN_POSITIONS = 2048


class Models:
    """The models of a run folder, each made once."""

    def __init__(self, config: BenchmarkJob) -> None:
        self._config = config

    @cached_property
    def fixed(self) -> Path:
        """Return a model whose responses end with max_new_tokens."""
        run = self._config.run
        return make_model(self._config.shape, run.folder / "model", seed=run.seed, positions=self._max_positions)

    @cached_property
    def exponential(self) -> Path:
        """Return a model with exponential response lengths, whose mean is half of max_new_tokens."""
        length = self._config.rollout.max_new_tokens / 2
        run = self._config.run
        folder = run.folder / "model-exponential"
        return make_model(self._config.shape, folder, seed=run.seed, mean_length=length, positions=self._max_positions)

    @property
    def _max_positions(self) -> int:
        return max(MIN_POSITIONS, self._config.rollout.max_model_len, self._config.reward_engine.max_model_len)

    @cached_property
    def tokenizer(self) -> Any:
        from t2g.text.tokenizer import load_tokenizer

        return load_tokenizer(str(self.fixed), None)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Return prompts of `prompt_tokens` letters each, which no piece of the tokenizer joins."""
        rng = np.random.default_rng(self._config.run.seed)
        letters = rng.choice([*"BCDFGHJK"], (64, self._config.prompt_tokens))
        prompts: list[Prompt] = []
        for number, row in enumerate(letters):
            text = "".join(row)
            ids = np.asarray(self.tokenizer(text)["input_ids"], np.int32)
            prompts.append(Prompt(prompt_id=f"p{number}", prompt_text=text, task="prompts", prompt_ids=ids))
        return prompts


def make_model(
    shape: ShapeConfig,
    folder: Path,
    *,
    seed: int,
    mean_length: float | None = None,
    positions: int = MIN_POSITIONS,
) -> Path:
    """Write a Hugging Face folder with random bfloat16 weights and a tokenizer; return `folder`.

    Args:
        mean_length: Mean tokens of a response, exponentially distributed. If None, responses never end by themselves;
            with tied embeddings the end token has the probability 1 / vocabulary size.

    Raises:
        UserError: mean_length is set with tied embeddings.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from t2g.tasks.tiny.assets import build_tokenizer

    if mean_length is not None and shape.tie_word_embeddings:
        raise UserError("shape.tie_word_embeddings needs to be false, so that responses have a mean length")
    letters = np.random.default_rng(0).choice([*"aeioudlmnrst"], (WORDS, 6))
    words = ["".join(word) for word in letters]
    tokenizer = build_tokenizer(folder, words, vocab_size=min(shape.vocab_size, 1024))
    fields = shape.model_dump(exclude={"architecture"})
    config = AutoConfig.for_model(
        shape.architecture, **fields, max_position_embeddings=positions, dtype=torch.bfloat16,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not shape.tie_word_embeddings:
        logit = NEVER
        if mean_length is not None:
            odds = (shape.vocab_size - 1) / (mean_length - 1)
            logit = math.log(odds)
        set_eos_logit(model, tokenizer.eos_token_id, logit)
    model.save_pretrained(folder)
    return folder


def set_eos_logit(model: Any, end: int, logit: float) -> None:
    """Set the logit of the end-of-sequence token at every position; all others are about 0."""
    import torch

    with torch.no_grad():
        head: torch.Tensor = model.get_output_embeddings().weight
        model.get_input_embeddings().weight[:, 0] = CONSTANT
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0
        head[:, 0] = 0
        head[end] = 0
        head[end, 0] = logit / math.sqrt(head.shape[1])  # what the last norm makes of the channel, beside small ones
