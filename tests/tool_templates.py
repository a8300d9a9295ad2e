"""Chat templates with tools of three families, written for the tests, and tokenizers that have them."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from t2g.tasks.tiny.assets import build_tokenizer

_CHATML_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}"""
_HERMES_CALLS = """\
    {%- for call in message.tool_calls or [] %}
        {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}"""
# As Qwen 2.5 and 3: results that follow each other are one message of the user.
QWEN = (
    _CHATML_TOOLS
    + """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}"""
    + _HERMES_CALLS
    + """\
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
# As Hermes 2 Pro: a message of the role tool for each result.
HERMES = (
    _CHATML_TOOLS
    + """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>\\n{"name": "' + message.name + '", "content": ' + message.content | tojson }}
        {{- '}\\n</tool_response>' }}
    {%- else %}{{- message.content }}{%- endif %}"""
    + _HERMES_CALLS
    + """\
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
# As Llama 3.1: tools in the first question, one call in a turn, results of the role ipython as JSON.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools %}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{%- endif %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
        {%- set function = message.tool_calls[0].function %}
        {{- '{"name": "' + function.name + '", "parameters": ' + function.arguments | tojson + '}' }}
    {%- elif message.role == 'tool' %}{{- message.content | tojson }}
    {%- else %}{{- message.content | trim }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
TEMPLATES = {"qwen": QWEN, "hermes": HERMES, "llama3": LLAMA3}
ENDS = {"qwen": "<|im_end|>", "hermes": "<|im_end|>", "llama3": "<|eot_id|>"}
PARSERS = {"qwen": None, "hermes": "hermes", "llama3": "llama3_json"}
_LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def build_tool_tokenizer(folder: Path, family: str) -> Any:
    tokenizer = build_tokenizer(folder, ["the cat sat on the mat", '{"name": "', '"arguments": {"'], vocab_size=320)
    special = _LLAMA3_TOKENS if family == "llama3" else ("<|im_start|>", "<|im_end|>")
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    if family == "qwen":  # as Qwen 3
        tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
