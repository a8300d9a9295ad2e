"""Tokenizers and random-weight models of the tiny worlds, as Hugging Face folders.

The policy and the reward model have different byte-level BPE tokenizers: the reward model's also learns the phrases of
critiques and JSON. Merges are learnt inside phrases and values only, so that a phrase is about one token and sequences
stay short. torch and transformers are imported inside the functions only.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from t2g.tasks.tiny import lookups, programs, world
from t2g.tasks.tiny.task import TinyCodeTask
from t2g.text.policy_chat import set_tools

PAD = "<|pad|>"
END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
TOOL = "<|tool|>"
SPECIAL_TOKENS = (PAD, END, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The names of the tools as a system message, and calls in Hermes's form.
TOOLS_TEMPLATE = """\
{%- if tools %}{{- '<|system|>' + tools | map(attribute='function.name') | join(' ') + '<|end|>' }}{%- endif %}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
# With Transformers' default initializer_range of 0.02, copying is learnt five to ten times slower than with 0.08.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}


def build_tokenizer(folder: Path | str, pieces: Iterable[str], *, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer on `pieces`, save it in `folder` and return it (PreTrainedTokenizerFast).

    Merges never join two pieces. The vocabulary has five special tokens, the 256 bytes and at most `vocab_size - 261`
    merges. `<|end|>` closes every chat message and is the end-of-sequence token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))
    return fast


def build_tokenizers(folder: Path, num_facts: int = 5) -> tuple[Any, Any]:
    """Build the tokenizers of policy and reward model in `folder/policy` and `folder/reward`."""
    extra = max(0, 90 * (num_facts - 5))  # further slots need merges, else a phrase takes several tokens
    pieces = world.tokenizer_pieces(reward=False, num_facts=num_facts)
    policy = build_tokenizer(folder / "policy", pieces, vocab_size=900 + extra)
    pieces = world.tokenizer_pieces(reward=True, num_facts=num_facts)
    reward = build_tokenizer(folder / "reward", pieces, vocab_size=1300 + extra)
    return policy, reward


def build_code_tokenizer(folder: Path) -> Any:
    """Build the policy's tokenizer of the world of code in `folder/policy`."""
    pieces = programs.tokenizer_pieces(TinyCodeTask.instruction.rstrip())
    return build_tokenizer(folder / "policy", pieces, vocab_size=600)


def build_tools_tokenizer(folder: Path, schemas: Sequence[Mapping[str, Any]]) -> Any:
    """Build the policy's tokenizer of the world of tools in `folder/policy`; its chats name the tools."""
    tokenizer = build_tokenizer(folder / "policy", lookups.tokenizer_pieces(), vocab_size=800)
    tokenizer.add_tokens([TOOL], special_tokens=True)
    tokenizer.chat_template = TOOLS_TEMPLATE
    set_tools(tokenizer, schemas, "the world of tools")
    tokenizer.save_pretrained(str(folder / "policy"))
    return tokenizer


def build_reward_model(folder: Path | str, tokenizer: Any, *, seed: int, **shape: float) -> Any:
    """Build a model in the size of the reward model, a fifth faster than the default and as accurate."""
    return build_model(folder, tokenizer, seed=seed, intermediate_size=256, **shape)


def build_model(folder: Path | str, tokenizer: Any, *, seed: int = 0, **shape: float) -> Any:
    """Save a Llama model with random float32 weights and its tokenizer in `folder`; return the model.

    Args:
        shape: Fields of LlamaConfig that replace those of SHAPE. vLLM's CPU attention must support the head size
            `hidden_size / num_attention_heads` (32, 64, 80, 96, 112, 128, ...).
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SHAPE | shape,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(str(folder), safe_serialization=True)
    tokenizer.save_pretrained(str(folder))
    return model
