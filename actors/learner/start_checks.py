"""Checks of a policy on its ranks before the first step: settings for speed and memory must not change its numbers.

Each check compares log-probabilities of a few tokens. All calls are collectives.
"""

from collections.abc import Sequence

import numpy as np
import torch

from actors.learner import zero3
from actors.learner.spec import LearnerSpec
from t2g.algo import shared_attention
from t2g.algo.logprobs import Rows
from t2g.algo.update_mode import disable_randomness, enter_update_mode, find_random_fields
from t2g.errors import UserError
from t2g.types import TokenIds

CHECKED_TOKENS = 64  # tokens of a prompt or response
MAX_MODE_GAP = 1e-3  # nats; the passes make the same operations, so that only a GPU's sums may differ in order


def check_update_mode(engine: zero3.Engine, spec: LearnerSpec) -> None:
    """Compare the log-probabilities of updates under gradient checkpointing with those of evaluation.

    Raises:
        UserError: They differ: something is random that this code does not know.
    """
    (ids,) = _spread_ids(engine, num_arrays=1)
    sequences = [TokenIds(prompt_ids=ids[:1], response_ids=ids[1:])]
    share_prompts = spec.learner.share_prompts
    engine.eval()
    expected = _compute_logprobs(engine, sequences, share_prompts=share_prompts)
    disable_randomness(engine.module)
    enter_update_mode(engine.module)
    in_update_mode = _compute_logprobs(engine, sequences, share_prompts=share_prompts)
    gap = float((in_update_mode - expected).abs().max())
    if not gap <= MAX_MODE_GAP:
        config = engine.module.config.get_text_config()
        random_fields = find_random_fields(config.to_dict())
        fields = " or ".join(random_fields) or f"the architecture {config.model_type}"
        raise UserError(
            f"learner.gradient_checkpointing is on, and the log-probabilities of model.policy={spec.model.policy!r} in "
            f"training mode differ by {gap:.2g} nats from those in evaluation mode, by {fields}: switch "
            "gradient checkpointing off, or set the field to 0 in the model's config.json"
        )


def check_shared_prompts(engine: zero3.Engine, spec: LearnerSpec) -> None:
    """Compare the log-probabilities of two responses in a shared row with those of transformers' own attention.

    Raises:
        UserError: Their mean difference is larger than rounding explains: a layer mixes tokens by other means than
            plain causal attention.
    """
    prompt_ids, *responses = _spread_ids(engine, num_arrays=3)
    sequences = [TokenIds(prompt_ids=prompt_ids, response_ids=response_ids) for response_ids in responses]
    engine.eval()
    shared = _compute_logprobs(engine, sequences, share_prompts=True)
    engine.module.set_attn_implementation("eager")
    separate = _compute_logprobs(engine, sequences, share_prompts=False)
    engine.module.set_attn_implementation(shared_attention.NAME)
    gap = float((shared - separate).abs().mean())  # the largest is .24 in bfloat16 where all is right
    tolerance = spec.learner.rounding_tolerance
    if not gap <= tolerance:
        model_type = engine.module.config.get_text_config().model_type
        raise UserError(
            f"learner.share_prompts is true, and the log-probabilities of model.policy={spec.model.policy!r} "
            f"({model_type}) in a shared row and in separate rows differ by {gap:.2g} nats, where rounding explains "
            f"{tolerance:g}; set learner.share_prompts=false"
        )


def _spread_ids(engine: zero3.Engine, *, num_arrays: int) -> list[np.ndarray]:
    """Return arrays of CHECKED_TOKENS ids, spread over the vocabulary."""
    vocab_size = engine.module.config.get_text_config().vocab_size
    ids = np.linspace(0, vocab_size - 1, num_arrays * CHECKED_TOKENS)
    return np.split(ids.astype(np.int32), num_arrays)


@torch.no_grad()
def _compute_logprobs(engine: zero3.Engine, sequences: Sequence[TokenIds], *, share_prompts: bool) -> torch.Tensor:
    rows = Rows(sequences, engine.device, share_prompts=share_prompts)
    return rows.token_outputs(engine, 1.0).logprobs
