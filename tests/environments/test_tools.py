"""Tools: their schemas, what a call of them answers, and which environments are refused."""

import asyncio
import threading
from typing import Any

import pytest
from tool_templates import ENDS, PARSERS, TEMPLATES, build_tool_tokenizer

from t2g.config import PolicyJob
from t2g.environments import Reply
from t2g.environments.call_readers import make_call_reader
from t2g.environments.converse import make_encoder
from t2g.environments.environment import Environment
from t2g.errors import RunStopped, UserError
from t2g.tasks.prompts_only import PromptsTask
from t2g.text.policy_chat import set_tools
from t2g.text.tokenizer import encode_chat
from t2g.text.tool_calls import read_hermes_calls
from t2g.types import Prompt, ToolResult

PROMPT = Prompt(prompt_id="p", prompt_text="Hello", task="prompts", payload={"towns": {"Oslo": "rain"}})


def weather(town: str, prompt: Prompt, days: int = 1) -> Any:
    """Return the weather.

    Args:
        town: A town of Norway.
        days: How many days ahead.
    """
    return [prompt.payload["towns"][town], days]


async def odd(kind: str) -> Any:
    """Return what no tool should.

    Args:
        kind: What happens.
    """
    if kind == "hang":
        await asyncio.sleep(60)
    if kind == "exit":
        raise SystemExit(3)
    values = {"long": "x" * 10_000_000, "control": "a\x00\x1b[2J\ud800<|im_end|>", "object": object(), "none": None}
    return values[kind]


class Offers:
    """A tool of each form; it has no method `reply`."""

    def __init__(self) -> None:
        self.tools = [weather, odd, (COUNT, self.count)]
        self.both = threading.Barrier(2, timeout=20)

    def count(self, read: str, prompt_id: int) -> str:
        self.both.wait()  # for another call at the same time
        return f"{read}{prompt_id}"


COUNT = {
    "name": "count",
    "description": "Count.",
    "parameters": {"type": "object", "properties": {"read": {"type": "string"}, "prompt_id": {"type": "integer"}}},
}


class InClass:
    def lookup(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return word + self.__class__.__name__

    tools = (lookup,)

    def reply(self, prompt: Prompt, messages: Any) -> Reply:
        return Reply("go on")


def make_environment(name: str = "Offers", **changes: Any) -> Environment:
    job = {
        "model": {"policy": "unused"},
        "data": {"path": "unused"},
        "environment": f"{__name__}:{name}",
        "feedback": {"source": "pkg:judge", "timeout_s": 3.0, "concurrency": 8},
        "rollout": {"max_calls": 3},
    }
    return Environment(PolicyJob.model_validate(job | changes), PromptsTask())


def call(text: str, environment: Environment | None = None) -> list[ToolResult]:
    environment = environment or make_environment()
    return asyncio.run(environment.call_tools(PROMPT, read_hermes_calls(text)))


def write(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_schemas_are_those_of_transformers_without_the_parameter_that_gets_the_prompt() -> None:
    environment = make_environment()
    assert environment.tools is not None
    first, _, last = environment.tools.schemas
    assert first["function"] == {
        "name": "weather",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "A town of Norway."},
                "days": {"type": "integer", "description": "How many days ahead."},
            },
            "required": ["town"],
        },
        "return": {},
    }
    assert last == {"type": "function", "function": COUNT}


def test_calls_of_a_turn_run_at_once_and_have_results_in_their_order() -> None:
    text = "Hm. " + write("count", '{"read": "a", "prompt_id": 1}') * 2 + write("weather", '{"town": "Oslo"}')
    feedback = {"source": "pkg:judge", "timeout_s": 30, "concurrency": 2}
    results = call(text, make_environment(feedback=feedback))
    assert [(one.tool, one.text, one.status) for one in results] == [
        ("count", "a1", "ok"),
        ("count", "a1", "ok"),
        ("weather", '["rain", 1]', "ok"),
    ]
    start, end = results[2].arguments["town"]
    assert text[start:end] == '"Oslo"' and text[slice(*results[2].characters)] == write("weather", '{"town": "Oslo"}')


def test_arguments_that_the_tool_does_not_have_are_left_out() -> None:
    text = write("weather", '{"town": "Oslo", "x": [1], "x.y": 2}') + write("wether", '{"town": "Oslo"}')
    known, unknown = call(text)
    assert [*known.arguments] == ["town"] and unknown.arguments == {}


@pytest.mark.parametrize(
    ("text", "status", "tool", "message"),
    [
        (write("weather", '{"town": "Rom"}'), "failed", "weather", "Error: KeyError: 'Rom'"),
        (write("odd", '{"kind": "exit"}'), "failed", "odd", "Error: SystemExit: 3"),
        (write("weather", '{"town": 7}'), "malformed", "weather", "Error: `town` is 7; it needs to be string"),
        (
            write("weather", '{"days": "1", "x": 1}'),
            "malformed",
            "weather",
            'Error: `town` is missing; `days` is "1"; it needs to be integer; `x` is no argument of weather',
        ),
        (write("weather", '{"town": "Oslo", "prompt": 1}'), "malformed", "weather", "Error: `prompt` is no argument"),
        (write("wether", "{}"), "malformed", "", 'Error: there is no tool "wether"; the tools are weather, odd, count'),
        (write("weather", '{"town": '), "malformed", "", "Error: the call is no JSON: Expecting value"),
        (
            write("odd", '{"kind": "hang"}'),
            "lost",
            "odd",
            "Error: the tool odd gave no answer within feedback.timeout_s",
        ),
        (
            write("odd", '{"kind": "long"}'),
            "lost",
            "odd",
            "Error: the tool odd returned 10000000 characters; it may return 20000",
        ),
        (write("odd", '{"kind": "control"}'), "ok", "odd", "a␀␛[2J\ufffd<|im_end|>"),
        (
            write("odd", '{"kind": "object"}'),
            "lost",
            "odd",
            "Error: the tool odd returned an object of the type object",
        ),
        (write("odd", '{"kind": "none"}'), "ok", "odd", "null"),
    ],
)
def test_every_call_gets_a_sentence(text: str, status: str, tool: str, message: str) -> None:
    (result,) = call(text)
    assert (result.status, result.tool) == (status, tool)
    assert result.text.startswith(message) and "\n" not in result.text
    assert result.is_fault == (status in ("malformed", "failed"))
    assert result.characters == (0, len(text))


def test_calls_beyond_the_limit_are_answered_and_not_made() -> None:
    results = call(write("weather", '{"town": "Oslo"}') * 5)
    assert [result.status for result in results] == ["ok"] * 3 + ["lost"] * 2
    assert results[3].text == "Error: a turn may make 3 calls, and this is one more"


def test_a_tool_that_hangs_again_and_again_stops_the_run() -> None:
    feedback = {"source": "pkg:judge", "timeout_s": 0.05, "concurrency": 1}
    environment = make_environment(feedback=feedback)
    with pytest.raises(RunStopped, match="the tool odd gave no answer 3 times in a row"):
        call(write("odd", '{"kind": "hang"}') * 3 + write("weather", "{}"), environment)


def test_a_turn_without_calls_ends_an_environment_without_replies() -> None:
    turns = [{"role": "assistant", "content": "Rain."}]
    assert asyncio.run(make_environment().reply(PROMPT, turns)) == Reply("", done=True)
    environment = make_environment("InClass")
    assert asyncio.run(environment.reply(PROMPT, turns)) == Reply("go on")
    (result,) = call(write("lookup", '{"word": "a"}'), environment)
    assert (result.text, result.status) == ("aInClass", "ok")


class Untyped:
    def __init__(self) -> None:
        self.tools = [lambda town: town]


class Builtin:
    tools = (max,)


class Twice:
    tools = (weather, weather)


class NoList:
    tools = "weather"


class NoSchema:
    tools = (({"name": "f", "parameters": {"type": "string"}}, weather),)


class NoFunction:
    tools = ("weather",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Untyped", "the tool <lambda> has no schema: DocstringParsingException"),
        ("Builtin", "the tool max has no schema: ValueError"),
        ("Twice", "has two tools with the name weather"),
        ("NoList", "its tools are 'weather'; they need to be a list"),
        ("NoSchema", "the schema of the tool weather is"),
        ("NoFunction", "has the tool 'weather'; it needs to be a function"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_environment(name)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {family: build_tool_tokenizer(tmp_path_factory.mktemp(family), family) for family in TEMPLATES}


@pytest.mark.parametrize("family", [*TEMPLATES])
def test_prompts_are_those_of_the_template_with_tools(tokenizers: dict[str, Any], family: str) -> None:
    tokenizer = tokenizers[family]
    original = tokenizer.chat_template
    environment = make_environment()
    assert environment.tools is not None
    schemas = environment.tools.schemas
    schemas[0]["function"]["description"] += " {% if x %} %} \"'\\ \u2028é"
    chat = [{"role": "user", "content": "Hello"}]
    expected = tokenizer.apply_chat_template(chat, tools=schemas, tokenize=False, add_generation_prompt=True)
    try:
        set_tools(tokenizer, schemas, "m")
        assert encode_chat(tokenizer, chat) == tokenizer(expected, add_special_tokens=False)["input_ids"]
        make_encoder(tokenizer, has_tools=True)
        make_call_reader(tokenizer, schemas, PARSERS[family])
        other = "llama3_json" if family != "llama3" else None
        with pytest.raises(UserError, match=r"which the parser \w+ does not read; set rollout.tool_parser"):
            make_call_reader(tokenizer, schemas, other)
        with pytest.raises(UserError, match=r"rollout.tool_parser=unheard is none of hermes, llama3_json"):
            make_call_reader(tokenizer, schemas, "unheard")
    finally:
        tokenizer.chat_template = original


def test_templates_without_tools_are_refused(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen"]
    original = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        with pytest.raises(UserError, match="leaves out the tools count"):
            set_tools(tokenizer, [{"type": "function", "function": COUNT}], "m")
        tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
        with pytest.raises(UserError, match="leaves out results of tools"):
            make_encoder(tokenizer, has_tools=True)
    finally:
        tokenizer.chat_template = original


def test_the_ends_of_turns_are_tokens(tokenizers: dict[str, Any]) -> None:
    for family, end in ENDS.items():
        assert tokenizers[family].convert_tokens_to_ids(end) in tokenizers[family].added_tokens_decoder
