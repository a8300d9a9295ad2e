"""The shape of a model: the numbers of parameters and of saved values that memory and FLOPs are computed from."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t2g.text.model_config import load_local_config

# Keys of config.json of mixtures of experts and latent attention, for which the formulas would be wrong.
UNSUPPORTED_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")


class ModelShape(BaseModel):
    """A decoder with grouped-query attention and a gated MLP, such as Llama, Mistral and Qwen.

    The fields are those of its config.json.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    model_type: str = ""
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = Field(default_factory=lambda fields: fields["num_attention_heads"])
    head_dim: int = Field(default_factory=lambda fields: fields["hidden_size"] // fields["num_attention_heads"])
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    final_logit_softcapping: float | None = None  # Gemma
    logits_scaling: float = 1.0  # Granite
    logit_scale: float = 1.0  # Cohere
    quantization_config: dict[str, Any] = {}

    @property
    def heads_numel(self) -> int:
        """Return the number of values of a token's query, and of its attention output."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_numel(self) -> int:
        """Return the number of values of a token's key, or of its value."""
        return self.num_key_value_heads * self.head_dim

    @property
    def layer_numel(self) -> int:
        """Return the parameters of a layer: q, k, v, o; gate, up, down; two norms.

        Qwen 2 has biases of q, k and v in addition, Qwen 3 norms of q and k.

        Llama 3 8B: 4096 x (4096 + 2 x 1024 + 4096) + 3 x 4096 x 14336 + 2 x 4096 = 218,112,000
        """
        qkv = self.heads_numel + 2 * self.kv_numel
        columns = qkv + self.heads_numel + 3 * self.intermediate_size + 2
        others = {"qwen2": qkv, "qwen3": 2 * self.head_dim}
        return self.hidden_size * columns + others.get(self.model_type, 0)

    @property
    def embedding_numel(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def backbone_numel(self) -> int:
        """Return the parameters of embedding, layers and last norm: a critic without its value head."""
        return self.embedding_numel + self.num_hidden_layers * self.layer_numel + self.hidden_size

    @property
    def numel(self) -> int:
        """Return all parameters.

        Llama 3 8B: 2 x 128256 x 4096 + 32 x 218,112,000 + 4096 = 8,030,261,248
        """
        if self.tie_word_embeddings:
            return self.backbone_numel
        return self.backbone_numel + self.embedding_numel

    def lora_numel(self, rank: int) -> int:
        """Return the parameters of adapters on every linear layer: rank x (in + out) each."""
        attention = 2 * (self.hidden_size + self.heads_numel) + 2 * (self.hidden_size + self.kv_numel)
        mlp = 3 * (self.hidden_size + self.intermediate_size)
        return self.num_hidden_layers * rank * (attention + mlp)

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token in the KV cache. Llama 3 8B in bfloat16: 2 x 32 x 8 x 128 x 2 = 131,072"""
        return 2 * self.num_hidden_layers * self.kv_numel * itemsize

    def saved_bytes(self, itemsize: int) -> int:
        """Return the bytes of activations that one layer saves for one token's backward pass; b: `itemsize`.

        Each of two norms saves a float32 copy, the normalized state and its output, the input of the next linear
        layers. Attention saves q, k, v and its output. The MLP saves gate, its SiLU, up and their product.

            2 x (4 + 2b) h + b (2 q + 2 kv) + 4 b i

        Llama 3 8B in bfloat16: 2 x 8 x 4096 + 2 x (2 x 4096 + 2 x 1024) + 8 x 14336 = 200,704
        """
        attention = 2 * itemsize * (self.heads_numel + self.kv_numel)
        return 2 * (4 + 2 * itemsize) * self.hidden_size + attention + 4 * itemsize * self.intermediate_size


LLAMA_3_8B = ModelShape(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
)
QWEN_2_5_1_5B = ModelShape(
    model_type="qwen2",
    hidden_size=1536,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    intermediate_size=8960,
    vocab_size=151936,
    tie_word_embeddings=True,
)
# Shapes of the models in the shipped configs, for machines without a copy of them.
SHAPES = dict.fromkeys(("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"), LLAMA_3_8B)
SHAPES["Qwen/Qwen2.5-1.5B-Instruct"] = QWEN_2_5_1_5B


def shape_of(numbers: dict[str, Any]) -> ModelShape | None:
    """Return the shape from the content of config.json, or None for an architecture that the formulas do not cover."""
    if any(numbers.get(key) for key in UNSUPPORTED_KEYS):
        return None
    fields = {key: value for key, value in numbers.items() if value is not None}
    try:
        return ModelShape.model_validate(fields)
    except ValidationError:
        return None


def find_shape(model: str, revision: str | None = None) -> ModelShape | None:
    """Return the shape of a model in a folder or in this machine's hub cache, or of a model of a shipped config."""
    config = load_local_config(model, revision)
    if config is None:
        return SHAPES.get(model)
    return shape_of(config.get_text_config().to_dict())
