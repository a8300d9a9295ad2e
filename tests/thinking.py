"""A tokenizer of a model that thinks: byte-level, with chat markers, tags and a chat template like Qwen3's."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from t2g.tasks.tiny.assets import build_tokenizer

OPEN = "<think>"
CLOSE = "</think>"
QWEN3_LIKE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
R1_LIKE = QWEN3_LIKE + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"  # the prompt opens the thinking


def build_thinking_tokenizer(folder: Path, *, template: str = QWEN3_LIKE, special: bool = False) -> Any:
    """Build a tokenizer whose tags are added tokens; special ones, as Magistral's, have no text."""
    tokenizer = build_tokenizer(folder, ["the cat sat on the mat", "so good"], vocab_size=300)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in (OPEN, CLOSE)])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return tokenizer
