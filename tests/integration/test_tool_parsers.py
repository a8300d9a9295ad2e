"""Tools' calls that vLLM's own parsers read, with the characters where they stand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tool_templates import build_tool_tokenizer

from actors.vllm_compat.tool_parsers import load_tool_parser
from t2g.environments.call_readers import make_call_reader
from t2g.errors import UserError

SCHEMA = {
    "type": "function",
    "function": {"name": "count", "parameters": {"type": "object", "properties": {"read": {"type": "string"}}}},
}
# As Qwen 3 Coder.
XML = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<parameter=' ~ name ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("hermes")
    return build_tool_tokenizer(folder, "hermes")


def test_a_parser_of_vllm_reads_calls(tokenizer: Any) -> None:
    parse = load_tool_parser("pythonic", tokenizer, [SCHEMA])
    assert parse('[count(read="a"), count(read="b")]') == [("count", {"read": "a"}), ("count", {"read": "b"})]
    assert parse("seven") == []
    with pytest.raises(UserError, match=r"rollout\.tool_parser=nope is none of hermes, llama3_json, "):
        load_tool_parser("nope", tokenizer, [SCHEMA])
    with pytest.raises(UserError, match="tool_parser=mistral does not fit the model's tokenizer: "):
        load_tool_parser("mistral", tokenizer, [SCHEMA])


def test_it_is_checked_with_the_chat_template(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="the parser pythonic does not read"):
        make_call_reader(tokenizer, [SCHEMA], "pythonic", load_tool_parser)
    original = tokenizer.chat_template
    tokenizer.chat_template = XML
    try:
        with pytest.raises(UserError, match="the parser hermes does not read"):
            make_call_reader(tokenizer, [SCHEMA], None, load_tool_parser)
        read_calls = make_call_reader(tokenizer, [SCHEMA], "qwen3_xml", load_tool_parser)
    finally:
        tokenizer.chat_template = original
    text = "Go.\n<tool_call>\n<function=count>\n<parameter=read>\nall\n</parameter>\n</function>\n</tool_call>"
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    (call,) = read_calls(ids, text)
    assert (call.name, call.arguments, call.problem) == ("count", {"read": "all"}, "")
    assert text[slice(*call.argument_characters["read"])] == "all"
