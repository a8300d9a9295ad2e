"""What reads the calls of tools in the policy's turns: the form in which the model's chat template writes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from t2g.errors import UserError
from t2g.text.offsets import token_offsets
from t2g.text.tokenizer import encode_texts
from t2g.text.tool_calls import CallReader, NamedCall, ToolCall, locate_calls, read_hermes_calls, read_llama3_calls

READERS: dict[str, CallReader] = {"hermes": read_hermes_calls, "llama3_json": read_llama3_calls}
TEMPLATE_PARSER = "response_template"  # transformers' parser, by the tokenizer's own description of its responses
DEFAULT_PARSER = "hermes"

Schemas = Sequence[Mapping[str, Any]]
ParseCalls = Callable[[str], Sequence[NamedCall]]  # an answer with its special tokens -> its calls; may raise anything
LoadParser = Callable[[str, Any, Schemas], ParseCalls]  # name, tokenizer, tools
# Ids of a turn and its answer, without special tokens -> its calls, with characters of the answer.
ReadCalls = Callable[[np.ndarray, str], list[ToolCall]]


def make_call_reader(
    tokenizer: Any, schemas: Schemas, parser: str | None, load_parser: LoadParser | None = None
) -> ReadCalls:
    """Return the function that reads the calls of a turn.

    Args:
        schemas: The tools, of OpenAI's form.
        parser: `rollout.tool_parser`; None: the tokenizer's own parser, if it has one, else Hermes's.
        load_parser: Loads one of vLLM's parsers.

    Raises:
        UserError: There is no such parser, or it does not read what the chat template writes.
    """
    has_template = getattr(tokenizer, "response_template", None) is not None
    name = parser or (TEMPLATE_PARSER if has_template else DEFAULT_PARSER)
    if name in READERS:
        read_text = READERS[name]

        def read_calls(ids: np.ndarray, answer: str) -> list[ToolCall]:
            return read_text(answer)
    else:
        if name == TEMPLATE_PARSER:
            parse = _make_template_parser(tokenizer, schemas)
        elif load_parser is not None:
            parse = load_parser(name, tokenizer, schemas)
        else:
            raise UserError(f"rollout.tool_parser={name} is none of {', '.join(READERS)}")
        read_calls = _make_located_reader(tokenizer, parse)
    _check_reader(tokenizer, schemas, name, read_calls)
    return read_calls


def _make_template_parser(tokenizer: Any, schemas: Schemas) -> ParseCalls:
    """Return the parser that transformers makes of the tokenizer's response template."""

    def parse(text: str) -> list[NamedCall]:
        message = tokenizer.parse_response(text, prefix="", tools=[*schemas])
        calls = []
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            calls.append(NamedCall(function["name"], function["arguments"]))
        return calls

    return parse


def _make_located_reader(tokenizer: Any, parse: ParseCalls) -> ReadCalls:
    """Return the reader of a parser that gives no positions of calls. An answer that it refuses has no calls."""

    def read_calls(ids: np.ndarray, answer: str) -> list[ToolCall]:
        offsets = token_offsets(tokenizer, ids)
        length = int(offsets[-1, 1]) if len(ids) else 0
        answer_ids = ids[offsets[:, 0] >= length - len(answer)]
        text = tokenizer.decode(answer_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        try:
            calls = [*parse(text)]
        except Exception:  # noqa: BLE001 parsers raise anything for a text of another form
            return []
        return locate_calls(answer, calls)

    return read_calls


def _check_reader(tokenizer: Any, schemas: Schemas, parser: str, read_calls: ReadCalls) -> None:
    """Raise UserError if the chat template writes a call in a form that the parser does not read."""
    name = schemas[0]["function"]["name"]
    arguments = {"t2g_dummy": "value"}  # a text: a parser of XML knows the types of a tool's own arguments alone
    call = {"type": "function", "function": {"name": name, "arguments": arguments}, "id": "call00000"}
    question = {"role": "user", "content": "Hello"}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        everything = tokenizer.apply_chat_template([question, turn], tokenize=False)
    except TemplateError:
        return  # such a template needs calls of another form; nothing is known of it
    if not everything.startswith(before) or "t2g_dummy" not in everything:
        return
    (ids,) = encode_texts(tokenizer, [everything[len(before) :]])
    answer = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    calls = read_calls(np.asarray(ids, np.int32), answer)
    if [(one.name, one.arguments, one.problem) for one in calls] == [(name, arguments, "")]:
        return
    raise UserError(
        f"environment: the chat template of {tokenizer.name_or_path} writes a call as {answer.strip()!r:.200}, which "
        f"the parser {parser} does not read; set rollout.tool_parser to {', '.join(READERS)} or a parser of vLLM"
    )
