"""Estimates of GPU memory per role, in bytes, from a model's shape and the config. Arithmetic only.

N parameters, R ranks, b bytes a weight (2 for bfloat16, 4 for float32). What no formula gives, the CUDA context,
NCCL's buffers, CUDA graphs, fragments, is one allowance, `OTHER_BYTES`. Estimates, to be held against
`torch.cuda.max_memory_allocated` once there is a run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t2g.config import Dtype, EngineConfig, LearnerConfig, ObjectiveConfig

GIB = 2**30
# GiB as the driver reports them, by the names that `jobs.deploy check --gpu` takes.
GPUS = {"A100-40GB": 40.0, "L40S": 45.0, "H100-80GB": 79.6, "A100-80GB": 80.0, "H200": 140.4, "B200": 179.0}
BYTES: dict[Dtype, int] = {"bfloat16": 2, "float32": 4}
OTHER_BYTES = 3 * GIB
LIVE_NUMEL = 1_000_000_000  # DeepSpeed's max_live_parameters and sub_group_size
BUCKET_NUMEL = 50_000_000  # of gradients under way, as actors.learner.zero3 sets it
CHUNK_TOKENS = 1024  # whose logits exist at once, as t2g.algo.logprobs has it


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP: Llama, Mistral, Qwen, and what looks like them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool  # the output head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def layer_numel(self) -> int:
        """q, k, v, o; gate, up, down; two norms.

        Llama 3 8B: 4096 x (4096 + 2 x 1024 + 4096) + 3 x 4096 x 14336 + 2 x 4096 = 218,112,000
        """
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        weights = self.hidden * (qkv + self.heads * self.head_dim) + 3 * self.hidden * self.intermediate
        return weights + 2 * self.hidden + (qkv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def embedding_numel(self) -> int:
        return self.vocab * self.hidden

    @property
    def backbone_numel(self) -> int:
        """Embedding, layers, last norm: what a critic has, but for its value head."""
        return self.embedding_numel + self.layers * self.layer_numel + self.hidden

    @property
    def numel(self) -> int:
        """Llama 3 8B: 2 x 128256 x 4096 + 32 x 218,112,000 + 4096 = 8,030,261,248"""
        return self.backbone_numel + (0 if self.tied else self.embedding_numel)

    def lora_numel(self, r: int) -> int:
        """Of adapters on every linear layer: r x (in + out) each."""
        out, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + out) + 2 * (self.hidden + kv)
        return self.layers * r * (attention + 3 * (self.hidden + self.intermediate))

    def kv_bytes(self, b: int) -> int:
        """A key and a value of one token. Llama 3 8B in bfloat16: 2 x 32 x 8 x 128 x 2 = 131,072"""
        return 2 * self.layers * self.kv_heads * self.head_dim * b

    def saved_bytes(self, b: int) -> int:
        """What one layer keeps of one token for its backward pass.

        Two norms keep a float32 copy, the normalised state and their result, the input of the next linear layers;
        attention keeps q, k, v and its result; the MLP gate, its SiLU, up and their product.

            2 x (4 + 2b) h + b (2 q + 2 kv) + 4 b i

        Llama 3 8B in bfloat16: 2 x 8 x 4096 + 2 x (2 x 4096 + 2 x 1024) + 8 x 14336 = 200,704
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * (4 + 2 * b) * self.hidden + 2 * b * (q + kv) + 4 * b * self.intermediate


LLAMA_3_8B = ModelShape(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, tied=False
)
# The gated models of the shipped configs, for machines that have no copy.
SHAPES = dict.fromkeys(("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"), LLAMA_3_8B)


def shape_of(config: Any) -> ModelShape | None:
    """From the numbers of a config.json. None for what it would be wrong for: experts, another attention."""
    numbers = config if isinstance(config, dict) else config.to_dict()
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if any(numbers.get(key) for key in experts) or not all(isinstance(numbers.get(key), int) for key in needed):
        return None
    hidden, heads, family = numbers["hidden_size"], numbers["num_attention_heads"], numbers.get("model_type", "")
    return ModelShape(
        hidden=hidden,
        layers=numbers["num_hidden_layers"],
        heads=heads,
        kv_heads=numbers.get("num_key_value_heads") or heads,
        head_dim=numbers.get("head_dim") or hidden // heads,
        intermediate=numbers["intermediate_size"],
        vocab=numbers["vocab_size"],
        tied=bool(numbers.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def find_shape(model: str, revision: str | None = None) -> ModelShape | None:
    """Of a folder, of what the hub's cache on this machine has, or of a model that we ship a config for."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(
            model, revision=None if Path(model).is_dir() else revision, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError):
        return SHAPES.get(model)
    return shape_of(found.get_text_config())


def states_bytes(numel: int, trained: int, *, ranks: int, b: int) -> dict[str, float]:
    """A model's share on one rank under ZeRO-3, of `numel` parameters of which `trained` are trained.

    Weights b N / R; gradients b n / R; AdamW's two moments 8 n / R, and in bfloat16 the float32 weights 4 n / R.
    """
    return {
        "weights": b * numel / ranks,
        "gradients": b * trained / ranks,
        "optimizer": (8 if b == 4 else 12) * trained / ranks,
    }


def learner_states(shape: ModelShape, learner: LearnerConfig, *, critic: bool) -> dict[str, float]:
    """Of one policy rank: the policy, its frozen reference (LoRA needs none), and the critic where it lives there."""
    b, ranks, lora = BYTES[learner.dtype], learner.workers, learner.lora
    if lora:
        adapters = shape.lora_numel(lora.r)
        models = [states_bytes(shape.numel + adapters, adapters, ranks=ranks, b=b)]
    else:
        models = [states_bytes(shape.numel, n, ranks=ranks, b=b) for n in (shape.numel, 0)]
    if critic:
        models.append(states_bytes(shape.backbone_numel, shape.backbone_numel, ranks=ranks, b=b))
    return {part: sum(model[part] for model in models) for part in models[0]}


def learner_bytes(
    shape: ModelShape, learner: LearnerConfig, objective: ObjectiveConfig, *, tokens: int
) -> dict[str, float]:
    """Parts of the GPU memory of one policy rank in a forward and backward pass over a microbatch of `tokens`.

    The optimizer's step, after the pass has given its memory back, needs less: float32 gradients and AdamW's
    temporary of LIVE_NUMEL parameters are 8 GB at most.
    """
    b = BYTES[learner.dtype]
    states = learner_states(shape, learner, critic=objective.uses_critic and learner.critic_ranks is None)
    logits = 16 * CHUNK_TOKENS * shape.vocab  # float32: logits, their log-softmax, and the gradients of both
    if objective.kl_estimator == "full":
        logits += b * tokens * shape.vocab
    return _on_gpu(states, learner) | _pass_bytes(shape, learner, tokens) | {"logits": float(logits)}


def critic_bytes(shape: ModelShape, learner: LearnerConfig, *, ranks: int, tokens: int) -> dict[str, float]:
    """The same of a rank of the critic's own group."""
    states = states_bytes(shape.backbone_numel, shape.backbone_numel, ranks=ranks, b=BYTES[learner.dtype])
    return _on_gpu(states, learner) | _pass_bytes(shape, learner, tokens)


def host_bytes(shape: ModelShape, learner: LearnerConfig, objective: ObjectiveConfig) -> float:
    """Of one policy rank in the host's memory: it loads policy, reference and critic whole before they are parted, and
    with offload=cpu their states stay there.

    Llama 3 8B in bfloat16, with a critic: 2 x (2 x 8.03 + 7.50) x 10^9 = 43.9 GiB.
    """
    critic = objective.uses_critic and learner.critic_ranks is None
    numel = shape.numel * (1 if learner.lora else 2) + (shape.backbone_numel if critic else 0)
    states = learner_states(shape, learner, critic=critic)
    return BYTES[learner.dtype] * numel + (sum(states.values()) if learner.offload == "cpu" else 0)


def _on_gpu(states: dict[str, float], learner: LearnerConfig) -> dict[str, float]:
    return states if learner.offload == "none" else dict.fromkeys(states, 0.0)


def _pass_bytes(shape: ModelShape, learner: LearnerConfig, tokens: int) -> dict[str, float]:
    b = BYTES[learner.dtype]
    return {
        "activations": float(activation_bytes(shape, tokens, b=b, checkpointing=learner.gradient_checkpointing)),
        "gathered": float(gathered_bytes(shape, b=b)),
        "other": float(OTHER_BYTES),
    }


def activation_bytes(shape: ModelShape, tokens: int, *, b: int, checkpointing: bool) -> int:
    """Of `tokens` tokens at the end of the forward pass; attention keeps no square matrix.

    Without checkpointing every layer's `saved_bytes`; with it each layer's input, b h, and one layer computed again.
    Llama 3 8B in bfloat16, 4096 tokens: 4096 x 32 x 200,704 = 24.5 GiB; checkpointed 1.77 GiB.
    """
    one = shape.saved_bytes(b)
    return tokens * (shape.layers * b * shape.hidden + one if checkpointing else shape.layers * one)


def gathered_bytes(shape: ModelShape, *, b: int) -> int:
    """Whole weights that stand on a rank while it computes: up to LIVE_NUMEL and the largest module, whose whole
    gradient comes beside it, and one bucket of gradients."""
    largest = max(shape.layer_numel, shape.embedding_numel)
    return b * (min(shape.numel, LIVE_NUMEL) + 2 * largest + BUCKET_NUMEL)


@dataclass(frozen=True, kw_only=True)
class EngineFit:
    """An engine on one of its GPUs."""

    parts: dict[str, float]  # bytes; the cache is what the wanted sequences need at full length
    wanted: int  # sequences at once
    fitting: int  # sequences of max_model_len that the cache has room for


def engine_fit(shape: ModelShape, engine: EngineConfig, *, sequences: int, gpu_bytes: float) -> EngineFit:
    """vLLM takes gpu_memory_utilization of the GPU: weights, b N / TP, `OTHER_BYTES`, and the rest is cache.

    sequences: that would run at once if there were room; never more than max_num_seqs.
    Llama 3 8B in bfloat16 on 80 GiB, .85, 1536 tokens: 68 - 14.96 - 3 = 50.04 GiB of cache; a sequence takes
    1536 x 128 KiB = .1875 GiB, so 266 fit.
    """
    b, parallel = BYTES[engine.dtype], engine.tensor_parallel
    wanted = min(sequences, engine.max_num_seqs)
    one = engine.max_model_len * shape.kv_bytes(b) / min(parallel, shape.kv_heads)
    weights = b * shape.numel / parallel
    room = engine.gpu_memory_utilization * gpu_bytes - weights - OTHER_BYTES
    return EngineFit(
        parts={"weights": weights, "cache": wanted * one, "other": float(OTHER_BYTES)},
        wanted=wanted,
        fitting=max(0, int(room // one)),
    )


def store_bytes(shape: ModelShape, *, b: int) -> int:
    """Of the object store beside rank 0: the last version of the policy, held for engines that come late. It is let
    go before the next one is sent."""
    return b * shape.numel
