"""Conversations: token ids as the chat template gives them at once, how a conversation ends, what its rollout holds."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinking import CLOSE, OPEN, QWEN3_LIKE, build_thinking_tokenizer
from tokenizers import AddedToken

from t2g.environments import Reply
from t2g.environments.converse import converse, make_encoder
from t2g.errors import UserError
from t2g.feedback.sources.user_function import FunctionFailed
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.text.offsets import decode
from t2g.text.thinking import find_answer_start
from t2g.text.tokenizer import encode_chat
from t2g.text.transcript import rollout_offsets
from t2g.types import Prompt, Rollout

LLAMA3_LIKE = """\
{%- for message in messages %}
    {%- if loop.first %}{{- '<|begin_of_text|>' }}{%- endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
# As Qwen3's: an answer after the last question has its thinking, or an empty one; earlier answers have none.
DROPS_THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {%- set content = '<think>\\n\\n</think>\\n\\n' + content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
FAMILIES = {"chatml": QWEN3_LIKE, "llama3": LLAMA3_LIKE, "thinking": DROPS_THINKING}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "thinking": "<|im_end|>"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    by_name = {}
    for name, template in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        if name == "llama3":
            by_name[name] = build_tokenizer(folder, ["the cat sat on the mat"], vocab_size=300)
            specials = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
            by_name[name].add_tokens([AddedToken(text, special=True) for text in specials])
            by_name[name].chat_template = template
        else:
            by_name[name] = build_thinking_tokenizer(folder, template=template)
    return by_name


class Script:
    """An environment with given replies."""

    timeout_s = 1.0

    def __init__(self, *replies: Reply | Exception) -> None:
        self.replies = replies
        self.seen = list[list[str]]()

    async def reply(self, prompt: Prompt, messages: Any) -> Reply:
        self.seen.append([f"{turn['role']}: {turn['content']}" for turn in messages])
        reply = self.replies[len(self.seen) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply


class Conversation:
    """One conversation with the policy's texts given; `contexts` are what it was asked after."""

    def __init__(self, tokenizer: Any, texts: list[str], end: str | None, question: str = "Write.") -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        self.end = end
        self.contexts = list[np.ndarray]()
        self.sampled = list[np.ndarray]()
        ids = encode_chat(tokenizer, [{"role": "user", "content": question}])
        self.prompt = Prompt(prompt_id="p", prompt_text="", task="t", prompt_ids=np.array(ids, np.int32))

    async def sample_turn(self, context: np.ndarray, number: int) -> Rollout:
        ids = self.tokenizer(self.texts[number], add_special_tokens=False)["input_ids"]
        end = [] if self.end is None else [self.tokenizer.convert_tokens_to_ids(self.end)]
        response_ids = np.array([*ids, *end], np.int32)
        self.contexts.append(context)
        self.sampled.append(response_ids)
        text = decode(self.tokenizer, response_ids)
        logprobs = np.full(len(response_ids), -1.0 - number, np.float32)
        answer_start = find_answer_start(self.tokenizer, context, response_ids, text, (OPEN, CLOSE))
        return Rollout(
            prompt_id="p", sample_index=3, prompt_ids=context, response_ids=response_ids, rollout_logprobs=logprobs,
            response_text=text, finish_reason="stop" if end else "length",
            policy_versions=((0, len(response_ids), number),), answer_start=answer_start,
        )  # fmt: skip

    def run(
        self, environment: Any, *, max_turns: int = 5, max_context_tokens: int = 10_000, read_calls: Any = None
    ) -> Rollout:
        encode = make_encoder(self.tokenizer)
        return asyncio.run(
            converse(
                self.prompt,
                self.sample_turn,
                environment,
                encode,
                max_turns=max_turns,
                max_context_tokens=max_context_tokens,
                read_calls=read_calls,
            )
        )


WORDS = st.text(alphabet="the cat\nsé東<|_>", min_size=1, max_size=12).filter(str.strip)
REPLIES = st.one_of(WORDS, st.sampled_from(["<|im_end|>", "a<|eot_id|>b", "<|end|> <think>"]))


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from([*FAMILIES]), question=WORDS, texts=st.lists(WORDS.map(str.strip), min_size=1, max_size=3),
    replies=st.lists(REPLIES, min_size=3, max_size=3),
)  # fmt: skip
def test_ids_are_those_of_the_template_applied_at_once(
    tokenizers: dict[str, Any], family: str, question: str, texts: list[str], replies: list[str]
) -> None:
    tokenizer = tokenizers[family]
    thinking = f"{OPEN}the{CLOSE}\n\n" if family == "thinking" else ""
    sampled = [thinking + text for text in texts]
    conversation = Conversation(tokenizer, sampled, ENDS[family], question)
    environment = Script(*(Reply(reply, done=i == len(texts) - 1) for i, reply in enumerate(replies)))
    rollout = conversation.run(environment)

    messages = [{"role": "user", "content": question}]
    length = len(tokenizer(thinking, add_special_tokens=False)["input_ids"])
    for number, (text, reply) in enumerate(zip(texts, replies, strict=False)):
        context = conversation.contexts[number].tolist()
        for turn in reversed(rollout.environment_turns[:number]):  # what was sampled stays, thinking included
            first = len(rollout.prompt_ids) + turn.tokens[0]
            assert tokenizer.decode(context[first : first + length]) == thinking
            del context[first : first + length]
        assert context == encode_chat(tokenizer, messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]

    everything = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    np.testing.assert_array_equal(everything, np.concatenate([conversation.contexts[-1], conversation.sampled[-1]]))
    for number, turn in enumerate(rollout.environment_turns):
        np.testing.assert_array_equal(rollout.response_ids[slice(*turn.tokens)], conversation.sampled[number])
        assert rollout.response_text[slice(*turn.characters)] == decode(tokenizer, conversation.sampled[number])
        assert (rollout.rollout_logprobs[slice(*turn.tokens)] == -1 - number).all()
    assert not rollout.rollout_logprobs[~rollout.policy_mask].any()
    assert [v for _, _, v in rollout.policy_versions] == [*range(len(texts))]
    assert [turn.reply for turn in rollout.environment_turns] == replies[: len(texts)]
    assert rollout.answer.strip() == decode(tokenizer, tokenizer(texts[-1], add_special_tokens=False)["input_ids"])
    ends = rollout_offsets(tokenizer, rollout)[:, 1]
    assert ends[-1] == len(rollout.response_text)
    assert (np.diff(ends) >= 0).all()


def test_a_turn_is_not_ended_twice_where_the_template_has_a_blank_before_the_end(tokenizers: dict[str, Any]) -> None:
    """As Llama 2's: ` ` + content + ` </s>`."""
    tokenizer = copy.deepcopy(tokenizers["chatml"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content }}"
        "{% else %}{{ ' ' + m.content + ' <|im_end|>' }}{% endif %}{% endfor %}"
    )
    rollout = Conversation(tokenizer, ["the", "cat"], "<|im_end|>").run(Script(Reply("sat"), Reply("", done=True)))
    assert tokenizer.decode(rollout.response_ids) == "the<|im_end|><|im_start|>satcat<|im_end|>"


@pytest.mark.parametrize(
    ("environment", "end", "options", "num_turns", "check"),
    [
        (Script(Reply("go on"), Reply("", done=True)), "<|im_end|>", {}, 2, lambda r: r.failure == ""),
        (Script(*[Reply("go on")] * 3), "<|im_end|>", {"max_turns": 2}, 2, lambda r: not r.is_window_full),
        (Script(*[Reply("go on")] * 3), None, {}, 1, lambda r: r.is_truncated),
        (Script(*[Reply("go on")] * 3), "<|im_end|>", {"max_context_tokens": 20}, 1, lambda r: r.is_window_full),
        (Script(Reply("go on"), FunctionFailed("it broke")), "<|im_end|>", {}, 2, lambda r: r.failure == "it broke"),
    ],
)
def test_a_conversation_ends(
    tokenizers: dict[str, Any],
    environment: Any,
    end: str | None,
    options: Any,
    num_turns: int,
    check: Callable[..., Any],
) -> None:
    rollout = Conversation(tokenizers["chatml"], ["the cat"] * 3, end).run(environment, **options)
    assert len(rollout.environment_turns) == num_turns
    assert rollout.sample_index == 3
    assert check(rollout)
    assert rollout.policy_mask[-1], "it ends with a sampled token"
    assert environment.seen[-1] == ["assistant: the cat", "user: go on"] * (num_turns - 1) + ["assistant: the cat"]


def test_a_turn_without_an_answer_gets_no_reply(tokenizers: dict[str, Any]) -> None:
    environment = Script()
    rollout = Conversation(tokenizers["thinking"], [f"{OPEN}the cat"], "<|im_end|>").run(environment)
    assert rollout.is_unfinished
    assert not environment.seen
    assert rollout.environment_turns[0].answer_start is None


def test_a_template_without_earlier_answers_is_refused(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path, ["the"], vocab_size=261)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(UserError, match="leaves out earlier answers"):
        make_encoder(tokenizer)
