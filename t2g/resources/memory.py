"""Estimate GPU memory per role, in bytes, from a model's shape and the config. Arithmetic only.

N parameters, R ranks, b bytes per weight (`itemsize`: 2 for bfloat16, 4 for float32). The CUDA context, NCCL's buffers
and fragmentation are one allowance: `OTHER_BYTES` of a rank, `ENGINE_OTHER_BYTES` of an engine. Not measured on a GPU:
compare the estimates with `torch.cuda.max_memory_allocated` of a first run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from t2g.config import Dtype, EngineConfig, GpuSharing, LearnerConfig, ObjectiveConfig, RolloutConfig, SFTOptions
from t2g.config.auto import GIB
from t2g.resources.model_shape import ModelShape

# GiB as the driver reports them, by the names that `jobs.deploy check --gpu` takes.
GPUS = {"L4": 22.5, "A100-40GB": 40.0, "L40S": 45.0, "H100-80GB": 79.6, "A100-80GB": 80.0, "H200": 140.4, "B200": 179.0}
BYTES: dict[Dtype, int] = {"bfloat16": 2, "float32": 4}
OTHER_BYTES = 3 * GIB
ENGINE_OTHER_BYTES = GIB
GPU_BATCHED_TOKENS = 8192  # max_num_batched_tokens of a GPU engine; vLLM's default for the LLM class is 2,048
# CUDA graphs of one size and one layer. vLLM logged .21 GiB for 35 sizes of Llama 3.2 1B, which has 16 layers
# (vllm-project/vllm, pull request 11349).
GRAPH_BYTES = 400 * 2**10
LIVE_NUMEL = 1_000_000_000  # DeepSpeed's max_live_parameters and sub_group_size
BUCKET_NUMEL = 50_000_000  # elements that DeepSpeed reduces or prefetches at once, at most those of the model
STEP_GROUP_NUMEL = 30_000_000  # parameters that a CPU rank's optimizer steps at once, sub_group_size there
CHUNK_TOKENS = 1024  # tokens whose logits exist at one time, as in t2g.algo.head
ONE_BYTE = ("fp8", "mxfp8", "int8")  # prefixes of vLLM 0.32's online quantisation methods with 8 bits per value


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of a role on one GPU."""

    parts: dict[str, float]  # bytes by name; an engine's "cache" is for num_sequences of max_model_len
    num_sequences: int = 0  # concurrent sequences of an engine
    fitting: int = 0  # sequences of max_model_len that fit in an engine's KV cache
    cache: float = 0.0  # bytes that an engine has left for its KV cache

    @property
    def total(self) -> float:
        return sum(self.parts.values())


Models = Sequence[tuple[int, int]]  # models of a rank: parameters, trained parameters


def learner_models(shape: ModelShape, learner: LearnerConfig, objective: ObjectiveConfig) -> Models:
    """Return a policy rank's models: policy, frozen reference unless LoRA, critic unless it has its own ranks."""
    models = [*sft_models(shape, learner)]
    if not learner.lora:
        models.append((shape.numel, 0))
    if objective.uses_critic and learner.critic_ranks is None:
        models += critic_models(shape)
    return models


def sft_models(shape: ModelShape, options: LearnerConfig | SFTOptions) -> Models:
    """Return the model of supervised training, with its adapters if there are any."""
    if options.lora is None:
        return [(shape.numel, shape.numel)]
    adapters = shape.lora_numel(options.lora.r)
    return [(shape.numel + adapters, adapters)]


def critic_models(shape: ModelShape) -> Models:
    return [(shape.backbone_numel, shape.backbone_numel)]


def states_bytes(models: Models, *, ranks: int, itemsize: int) -> dict[str, float]:
    """Return one rank's share under ZeRO-3 of N parameters, n of them trained.

    Weights b N / R; gradients, accumulated in float32, 4 n / R; AdamW's two moments 8 n / R, and 4 n / R for
    DeepSpeed's float32 copy of the weights, which it makes even of float32 weights.
    """
    numel = 0
    trained = 0
    for model_numel, model_trained in models:
        numel += model_numel
        trained += model_trained
    return {
        "weights": itemsize * numel / ranks,
        "gradients": 4 * trained / ranks,
        "optimizer": 12 * trained / ranks,
    }


def estimate_rank(
    shape: ModelShape,
    models: Models,
    learner: LearnerConfig | SFTOptions,
    *,
    ranks: int,
    tokens: int,
    logits: float = 0.0,
    shared_keys: float = 0.0,
    ipc_buffers: float = 0.0,
) -> Estimate:
    """Estimate the memory of a rank during the forward and backward pass over a microbatch of `tokens` tokens.

    The optimizer step after the pass needs less: a copy of the gradients of LIVE_NUMEL parameters, 4 GB at most.
    """
    itemsize = BYTES[learner.dtype]
    parts = states_bytes(models, ranks=ranks, itemsize=itemsize)
    if learner.offload != "none":
        parts = dict.fromkeys(parts, 0.0)
    parts["activations"] = activation_bytes(
        shape, tokens, itemsize=itemsize, checkpointing=learner.gradient_checkpointing
    )
    parts["gathered"] = gathered_bytes(shape, itemsize=itemsize)
    parts["other"] = OTHER_BYTES
    if logits:
        parts["logits"] = logits
    if shared_keys:
        parts["shared_keys"] = shared_keys
    if ipc_buffers:
        parts["ipc_buffers"] = ipc_buffers
    return Estimate(parts=parts)


def shared_keys_bytes(
    shape: ModelShape, learner: LearnerConfig, rollout: RolloutConfig, *, tokens: int, itemsize: int
) -> float:
    """Return the bytes of the keys and values that `t2g.algo.shared_attention` copies for each response.

    A prompt of P tokens with k responses of R tokens is a row of P + k R tokens. Its copies are keys and values of all
    heads for k (P + R) tokens, in each layer, or in one with gradient checkpointing. P and R are the largest of the
    config.
    """
    if not learner.share_prompts:
        return 0.0
    prompt = rollout.max_prompt_tokens
    response = rollout.max_new_tokens
    number = rollout.samples_per_prompt
    copies_per_token = number * (prompt + response) / (prompt + number * response)
    layers = 1 if learner.gradient_checkpointing else shape.num_hidden_layers
    return tokens * copies_per_token * layers * 2 * itemsize * shape.heads_numel


def ipc_buffer_bytes(shape: ModelShape, learner: LearnerConfig, *, itemsize: int) -> float:
    """Return the bytes of the two permanent buckets from which engines on the rank's GPU copy weights by CUDA IPC.

    A bucket has sync_bucket_mib, or the largest module if that is larger.
    """
    if not learner.uses_cuda_ipc:
        return 0.0
    module = itemsize * max(shape.layer_numel, shape.embedding_numel)
    return 2 * max(learner.sync_bucket_mib * 2**20, module)


def logits_bytes(
    shape: ModelShape, learner: LearnerConfig | SFTOptions, *, tokens: int, objective: ObjectiveConfig | None = None
) -> float:
    """Return the bytes of the logits of a microbatch of `tokens` tokens and of the arrays computed from them.

    A chunk needs 3 float32 arrays of its logits' shape. Entropy needs 9 more bytes per value. The full KL needs 21 more
    and the reference's logits of all tokens. A model that transforms its logits needs 4 arrays of all tokens.

    Args:
        objective: The objective of PPO, which computes entropy; None for supervised training.
    """
    has_full_kl = objective is not None and objective.kl_estimator == "full"
    chunk_bytes = 12 + 9 * (objective is not None) + 21 * has_full_kl
    is_scaled = (shape.logits_scaling, shape.logit_scale) != (1, 1)
    is_transformed = is_scaled or shape.final_logit_softcapping is not None
    arrays = has_full_kl + 4 * is_transformed  # arrays of all tokens
    chunk = chunk_bytes * min(CHUNK_TOKENS, tokens)
    return (chunk + BYTES[learner.dtype] * tokens * arrays) * shape.vocab_size


def host_bytes(
    shape: ModelShape, learner: LearnerConfig, objective: ObjectiveConfig, *, sharing: GpuSharing = "none"
) -> float:
    """Return an upper bound of the host memory of one policy rank.

    A model whose files have another dtype than the learner is converted before it is partitioned: policy, reference and
    critic. Other models are read as file pages that the ranks of a node share. With offload=cpu the states stay on the
    host, where DeepSpeed has weights and gradients twice: by parameter and as flat buffers. With gpu_sharing=alternate
    gradients and optimizer are there while the engines sample.

    Llama 3 8B in bfloat16, with a critic: 2 x (2 x 8.03 + 7.50) x 10^9 = 43.9 GiB.
    """
    models = learner_models(shape, learner, objective)
    itemsize = BYTES[learner.dtype]
    loads = itemsize * sum(numel for numel, _ in models)
    states = states_bytes(models, ranks=learner.workers, itemsize=itemsize)
    if learner.offload == "cpu":
        return loads + 2 * states["weights"] + 2 * states["gradients"] + states["optimizer"]
    if sharing == "alternate":
        return max(loads, states["gradients"] + states["optimizer"])
    return loads


def coresident_bytes(fit: Estimate, engine: EngineConfig, *, sharing: GpuSharing, gpu_bytes: float) -> dict[str, float]:
    """Return, by role, the GPU memory that the other role on a shared GPU has while this role works.

    With gpu_sharing=split a rank has an engine's share beside it, and an engine a complete rank. With alternate a rank
    has a sleeping engine beside it. An engine has the rank's weights beside it and, during a push, four buckets: two
    for CUDA IPC and two that they are gathered in.

    Args:
        fit: The estimate of the rank.
    """
    if sharing != "alternate":
        return {"learner": engine.gpu_memory_utilization * gpu_bytes, "rollout": fit.total}
    buckets = 2 * fit.parts.get("ipc_buffers", 0)
    return {"learner": OTHER_BYTES, "rollout": fit.parts["weights"] + buckets + OTHER_BYTES}


def activation_bytes(shape: ModelShape, tokens: int, *, itemsize: int, checkpointing: bool) -> int:
    """Return the activations of `tokens` tokens at the end of the forward pass; attention saves no square matrix.

    Without checkpointing: `saved_bytes` of every layer. With it: the input of every layer, b h, and one layer's
    recomputed activations. Llama 3 8B in bfloat16, 4096 tokens: 4096 x 32 x 200,704 = 24.5 GiB; checkpointed 1.77 GiB.
    """
    layer = shape.saved_bytes(itemsize)
    if not checkpointing:
        return tokens * shape.num_hidden_layers * layer
    inputs = shape.num_hidden_layers * itemsize * shape.hidden_size
    return tokens * (inputs + layer)


def gathered_bytes(shape: ModelShape, *, itemsize: int) -> int:
    """Return the bytes of gathered weights and of gradients in reduction on a rank.

    Gathered are weights up to LIVE_NUMEL, and the largest module with its gradient. Gradients are reduced in float32: a
    bucket, and two copies of the largest weight's gradient, in its own order and in the order of the ranks.

    Llama 3 8B in bfloat16: 2 x (10^9 + 2 x 525,336,576) + 4 x (50,000,000 + 2 x 525,336,576) = 7.92 GiB.
    """
    module = max(shape.layer_numel, shape.embedding_numel)
    weight = max(shape.embedding_numel, shape.hidden_size * shape.intermediate_size, BUCKET_NUMEL)
    weights = itemsize * (min(shape.numel, LIVE_NUMEL) + 2 * module)
    gradients = 4 * (BUCKET_NUMEL + 2 * weight)
    return weights + gradients


def layer_weight_bytes(shape: ModelShape, engine: EngineConfig) -> float:
    """Return the bytes per value of the layers' matrices. Embedding and head are never quantized.

    AWQ and GPTQ have a 16-bit scale and a zero point per group: 4 bits in groups of 128 are (4 + 20 / 128) / 8 = .52
    bytes.
    """
    config = shape.quantization_config
    method = str(engine.engine_args.get("quantization") or config.get("quant_method"))
    if method.startswith(ONE_BYTE):
        return 1.0
    if method.removeprefix("auto_").removesuffix("_marlin") in ("awq", "gptq"):
        bits = config.get("bits", 4)
        group = config.get("group_size", 128)
        if group <= 0:
            group = shape.hidden_size
        return (bits + (16 + bits) / group) / 8
    return BYTES[engine.dtype]


def profile_bytes(shape: ModelShape, engine: EngineConfig) -> float:
    """Return the peak memory of an engine's forward pass beside its weights, as in vLLM's profile run.

    A step of T tokens has in one layer the residual twice, the layer's input, q, k, v, the attention output, gate, up
    and their product. The sampler of S sequences has the logits and three float32 copies of them.

        b T (3 h + (2 q + 2 kv + 3 i) / TP) + S V (b + 12)

    Llama 3 8B in bfloat16, T = 8192, S = 512: 1.00 + .86 = 1.86 GiB.
    """
    itemsize = BYTES[engine.dtype]
    tokens = engine.engine_args.get("max_num_batched_tokens", GPU_BATCHED_TOKENS)
    partitioned = 2 * (shape.heads_numel + shape.kv_numel) + 3 * shape.intermediate_size
    layer = 3 * shape.hidden_size + partitioned / engine.tensor_parallel
    sampler = engine.max_num_seqs * shape.vocab_size * (itemsize + 12)
    return itemsize * tokens * layer + sampler


def graph_bytes(shape: ModelShape, engine: EngineConfig) -> float:
    """Return the memory of an engine's CUDA graphs.

    vLLM 0.32 captures the sizes 1, 2, 4, multiples of 8 below 256 and multiples of 16 from 256, up to the smaller of
    512 and twice max_num_seqs.

    Llama 3 8B with max_num_seqs=256 or more: 51 sizes x 32 layers x 400 KiB = .62 GiB.
    """
    if engine.enforce_eager:
        return 0.0
    largest = min(512, 2 * engine.max_num_seqs)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return GRAPH_BYTES * shape.num_hidden_layers * sum(size <= largest for size in sizes)


def estimate_engine(shape: ModelShape, engine: EngineConfig, *, sequences: int, gpu_bytes: float) -> Estimate:
    """Estimate an engine's memory.

    The KV cache gets gpu_memory_utilization of the GPU less the weights (b N / TP unless quantized), `profile_bytes`,
    `graph_bytes` and `ENGINE_OTHER_BYTES`.

    Args:
        sequences: Concurrent sequences of the workload; at most max_num_seqs of them run at one time.

    Llama 3 8B in bfloat16 on 80 GiB, .85, 1536 tokens, eager: 68 - 14.96 - 1.86 - 1 = 50.19 GiB of cache; a sequence
    takes 1536 x 128 KiB = .1875 GiB, so 267 fit. With quantization=fp8 its weights are 8.46 GiB.
    """
    itemsize = BYTES[engine.dtype]
    kv_dtype = str(engine.engine_args.get("kv_cache_dtype"))
    kv_bytes = shape.kv_bytes(1 if kv_dtype.startswith("fp8") else itemsize)
    parallel = min(engine.tensor_parallel, shape.num_key_value_heads)
    sequence = engine.max_model_len * kv_bytes / parallel

    layers = shape.num_hidden_layers * shape.layer_numel
    weights = itemsize * (shape.numel - layers) + layer_weight_bytes(shape, engine) * layers
    parts = {
        "weights": weights / engine.tensor_parallel,
        "activations": profile_bytes(shape, engine),
        "graphs": graph_bytes(shape, engine),
        "other": ENGINE_OTHER_BYTES,
    }
    room = engine.gpu_memory_utilization * gpu_bytes - sum(parts.values())
    num_sequences = min(sequences, engine.max_num_seqs)
    fitting = max(0, int(room // sequence))
    parts["cache"] = num_sequences * sequence
    return Estimate(parts=parts, num_sequences=num_sequences, fitting=fitting, cache=room)


def store_bytes(shape: ModelShape, learner: LearnerConfig, *, itemsize: int) -> int:
    """Return the bytes that rank 0 has in the object store: the latest policy or adapters, for engines that join late.

    They are deleted before the next version is sent.
    """
    if learner.lora and learner.sends_adapters:
        return itemsize * shape.lora_numel(learner.lora.r)
    return itemsize * shape.numel
