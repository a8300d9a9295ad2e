"""vLLM's parsers of tool calls, by the names of its option --tool-call-parser."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from t2g.environments.call_readers import READERS, ParseCalls
from t2g.errors import UserError
from t2g.text.tool_calls import NamedCall


def load_tool_parser(name: str, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> ParseCalls:
    """Return the parser of that name. UserError if there is none, or it does not fit the tokenizer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser_class = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        names = ", ".join(dict.fromkeys([*READERS, *sorted(ToolParserManager.lazy_parsers)]))
        raise UserError(f"rollout.tool_parser={name} is none of {names}") from error
    question = {"role": "user", "content": "Hello"}
    request = ChatCompletionRequest(messages=[question], tools=[*schemas], model="")
    try:
        parser_class(tokenizer, request.tools)
    except Exception as error:  # parsers look for their tokens
        raise UserError(f"rollout.tool_parser={name} does not fit the model's tokenizer: {error}") from error

    def parse(text: str) -> list[NamedCall]:
        parser = parser_class(tokenizer, request.tools)  # parsers keep state of a text
        information = parser.extract_tool_calls(text, request)
        calls = []
        for call in information.tool_calls:
            arguments = json.loads(call.function.arguments)
            calls.append(NamedCall(call.function.name, arguments))
        return calls

    return parse
