"""Estimate the host memory of processes that compute on CPUs, from a model's shape and the config.

The formulas count the peak of a rank with float32 attention (transformers' eager implementation, which saves the matrix
of attention weights). They were held against the peaks of real ranks, see tests/resources/test_host_memory.py.
"""

from t2g.config import EngineConfig, LearnerConfig, ObjectiveConfig, SFTOptions
from t2g.resources.memory import (
    BUCKET_NUMEL,
    BYTES,
    GIB,
    STEP_GROUP_NUMEL,
    Models,
    learner_models,
    logits_bytes,
)
from t2g.resources.model_shape import ModelShape

PROCESS_BYTES = 0.6 * GIB  # a rank without a model: Python, torch, DeepSpeed, Ray
ENGINE_PROCESS_BYTES = 2.0 * GIB  # a worker and its engine core without weights and KV cache; 0.7 shared with others
HEAP_FACTOR = 1.25  # bytes of the heap for each byte of the arrays in it, see `rank_environment`
STEP_COPIES = 3  # arrays of the size of a group within AdamW's step: a gradient and two temporaries
# On a CPU, transformers' eager attention is faster than sdpa for rows of 250 tokens, and slower for 650. Supervised
# training takes sdpa for longer rows, which saves no attention weights.
MAX_EAGER_TOKENS = 512


def rank_bytes(
    shape: ModelShape,
    models: Models,
    options: LearnerConfig | SFTOptions,
    *,
    tokens: int,
    row: int,
    logits: float,
    shared_keys: float = 0.0,
    ranks: int | None = None,
) -> dict[str, float]:
    """Return the peak memory of a rank on a CPU by its parts; backward pass and optimizer step do not add up.

    N parameters, n of them trained, R ranks, b bytes per weight (`itemsize`). Float32 models have a float32 copy of
    trained weights, too: weights b N / R; gradients 4 n / R; AdamW's two moments and the copy 12 n / R. The arrays of a
    backward pass take HEAP_FACTOR times their size.

    Args:
        tokens: Tokens of a microbatch.
        row: Tokens of the longest sequence; 0 if attention saves no weights.
        logits: See `logits_bytes`.
        shared_keys: See `shared_keys_bytes`.
        ranks: In place of `options.workers`.
    """
    itemsize = BYTES[options.dtype]
    ranks = ranks or options.workers
    numel = sum(count for count, _ in models)
    trained = sum(count for _, count in models)
    activations = eager_activation_bytes(
        shape, tokens, row, itemsize=itemsize, checkpointing=options.gradient_checkpointing
    )
    reduced = min(BUCKET_NUMEL, trained) + 2 * min(shape.embedding_numel, trained)  # gradients in reduction
    backward = activations + shared_keys + logits + 4 * reduced
    group = min(trained / ranks, STEP_GROUP_NUMEL + shape.embedding_numel / ranks)
    return {
        "process": PROCESS_BYTES,
        "weights": itemsize * numel / ranks,
        "gradients": 4 * trained / ranks,
        "optimizer": 12 * trained / ranks,
        "work": max(HEAP_FACTOR * backward, STEP_COPIES * 4 * group),
    }


def eager_activation_bytes(shape: ModelShape, tokens: int, row: int, *, itemsize: int, checkpointing: bool) -> int:
    """Return the activations of a microbatch in rows of `row` tokens at the end of the forward pass.

    In each layer and for each token: `saved_bytes`; keys and values of all heads instead of their own number, since
    eager attention repeats them; and float32 attention weights, 4 row bytes a head.

    With checkpointing: the input of every layer, and one layer with the gradients of its activations.
    """
    repeated = 2 * itemsize * (shape.heads_numel - shape.kv_numel)
    attention_weights = (4 + itemsize * (itemsize < 4)) * shape.num_attention_heads * row
    layer = shape.saved_bytes(itemsize) + repeated + attention_weights
    if not checkpointing:
        return tokens * shape.num_hidden_layers * layer
    inputs = shape.num_hidden_layers * itemsize * shape.hidden_size
    return tokens * (inputs + 2 * layer)


def engine_bytes(shape: ModelShape, engine: EngineConfig) -> float:
    """Return the memory of a CPU engine with its worker: KV cache, and weights as loaded, sent and packed."""
    weights = BYTES[engine.dtype] * shape.numel
    return ENGINE_PROCESS_BYTES + 3 * weights + engine.kv_cache_gib * GIB


def learner_parts(
    shape: ModelShape,
    learner: LearnerConfig,
    objective: ObjectiveConfig,
    longest: int,
    *,
    shared_keys: float = 0.0,
) -> dict[str, float]:
    """Return `rank_bytes` of a rank of PPO that has the policy.

    Args:
        longest: Tokens of the longest sequence. If it has more than tokens_per_microbatch it is a microbatch by itself.
        shared_keys: See `shared_keys_bytes`.
    """
    tokens = max(learner.tokens_per_microbatch, longest)
    logits = logits_bytes(shape, learner, tokens=tokens, objective=objective)
    models = learner_models(shape, learner, objective)
    row = 0 if learner.share_prompts else longest  # the attention for shared prompts saves no weights
    return rank_bytes(shape, models, learner, tokens=tokens, row=row, logits=logits, shared_keys=shared_keys)


def advise(section: str, options: LearnerConfig | SFTOptions) -> str:
    """Return the keys of a section that lower the memory of a rank, with their values."""
    advice = f"lower {section}.tokens_per_microbatch ({options.tokens_per_microbatch})"
    if options.gradient_checkpointing:
        return advice
    return f"{advice} or set {section}.gradient_checkpointing=true"
