"""One conversation: the policy's turns, the environment's replies, and the rollout that they make.

Sampled ids are never tokenized again. A reply is encoded as what the chat template adds for it to a fixed dummy
conversation: a template that rewrites earlier messages, as those of thinking models do, does not change what was
sampled, and earlier thinking stays.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from t2g.environments.call_readers import ReadCalls
from t2g.environments.environment import Environment, Reply
from t2g.errors import UserError
from t2g.feedback.sources.user_function import FunctionFailed
from t2g.text.ends import ANSWER, CHAT
from t2g.text.tokenizer import Message, chat_renderer, encode_texts
from t2g.text.transcript import format_reply, list_reply
from t2g.types import PolicyTurn, Prompt, Rollout, ToolResult

DUMMY_RESULT = "t2g-dummy-result"

# Context [P] and number of the turn, 0, 1, ... -> the turn.
SampleTurn = Callable[[np.ndarray, int], Awaitable[Rollout]]
# The messages of a reply, and the ids of the turn before it -> inserted ids.
EncodeReply = Callable[[Sequence[Message], np.ndarray], np.ndarray]


def make_encoder(tokenizer: Any, *, has_tools: bool = False) -> EncodeReply:
    """Return the function that encodes a reply: from the end of the turn before it to the start of the next turn.

    A turn that ends with the token that the template puts there is not ended twice.

    Args:
        has_tools: Whether results of tools are to be checked, too.

    Raises:
        UserError: The tokenizer has no chat template, or its template leaves out earlier answers or results of tools.
    """
    render = chat_renderer(tokenizer)

    def encode(reply: Sequence[Message], turn_ids: np.ndarray) -> np.ndarray:
        text = render([*CHAT, *reply])
        _, separator, added = text.partition(ANSWER)
        if not separator:
            name = tokenizer.name_or_path
            raise UserError(f"environment: the chat template of {name} leaves out earlier answers; take another model")
        num_blanks = len(added) - len(added.lstrip())  # some templates put blanks before the end of a turn
        candidates = [added[start:] for start in range(num_blanks + 1)]
        by_start = [np.asarray(row, np.int32) for row in encode_texts(tokenizer, candidates)]
        for ids in by_start:
            if np.array_equal(ids[:1], turn_ids[-1:]):
                return ids[1:]
        return by_start[0]

    no_ids = np.zeros(0, np.int32)
    encode([{"role": "user", "content": "Hello"}], no_ids)
    if has_tools:
        result = ToolResult(tool="tool", text=DUMMY_RESULT, characters=(0, 0))
        reply = list_reply("", [result])
        encode(reply, no_ids)
        if DUMMY_RESULT not in render([*CHAT, *reply]):
            name = tokenizer.name_or_path
            raise UserError(f"environment: the chat template of {name} leaves out results of tools; take another model")
    return encode


class TurnReply(NamedTuple):
    """The reply to a turn, which is the results of its calls if it has any."""

    environment_reply: Reply
    results: tuple[ToolResult, ...] = ()

    @property
    def messages(self) -> list[Message]:
        return list_reply(self.environment_reply.text, self.results)


async def converse(
    prompt: Prompt,
    sample_turn: SampleTurn,
    environment: Environment,
    encode: EncodeReply,
    *,
    max_turns: int,
    max_context_tokens: int,
    read_calls: ReadCalls | None = None,
) -> Rollout:
    """Return the conversation that starts with a prompt.

    It ends when the environment is done or fails, after `max_turns`, with a turn that is truncated or has no answer,
    and when the next turn would not fit into the window.

    Args:
        max_context_tokens: A turn of full length fits after them.
        read_calls: Reads the calls of the environment's tools; None: it has none.

    Raises:
        RunStopped: As `Environment.reply`.
    """
    context = prompt.prompt_ids
    messages: list[Message] = []
    turns: list[Rollout] = []
    replies: list[TurnReply] = []
    inserted: list[np.ndarray] = []
    failure = ""
    is_window_full = False
    while True:
        turn = await sample_turn(context, len(turns))
        turns.append(turn)
        messages.append({"role": "assistant", "content": turn.answer})
        if turn.answer_start is None:
            break
        try:
            reply = await _reply(prompt, turn, messages, environment, read_calls)
        except FunctionFailed as failed:
            failure = str(failed)
            break
        replies.append(reply)
        if reply.environment_reply.done or turn.is_truncated or len(turns) == max_turns:
            break
        added = encode(reply.messages, turn.response_ids)
        context = np.concatenate([context, turn.response_ids, added])
        is_window_full = len(context) > max_context_tokens
        if is_window_full:
            break
        inserted.append(added)
        messages += reply.messages
    return join_turns(prompt, turns, replies, inserted, failure=failure, is_window_full=is_window_full)


async def _reply(
    prompt: Prompt,
    turn: Rollout,
    messages: Sequence[Message],
    environment: Environment,
    read_calls: ReadCalls | None,
) -> TurnReply:
    """Return the results of the turn's calls, or the environment's reply to a turn without calls."""
    calls = read_calls(turn.response_ids, turn.answer) if read_calls else []
    if not calls:
        return TurnReply(await environment.reply(prompt, messages))
    results = await environment.call_tools(prompt, calls)
    text = "\n\n".join(result.text for result in results)
    return TurnReply(Reply(text), tuple(results))


def join_turns(
    prompt: Prompt,
    turns: Sequence[Rollout],
    replies: Sequence[TurnReply],
    inserted: Sequence[np.ndarray],
    **ending: Any,
) -> Rollout:
    """Return the turns as one rollout.

    Args:
        turns: Each as a response to all that was before it.
        replies: The replies to the turns; the last turn may have none.
        inserted: The tokens between two turns.
        ending: `failure` and `is_window_full` of the rollout.
    """
    transcript = _Transcript()
    metrics: dict[str, float] = {}
    for turn, reply, added in zip_longest(turns, replies, inserted):
        transcript.add_turn(turn, reply or TurnReply(Reply("")))
        if reply:
            metrics |= reply.environment_reply.metrics
        if added is not None:
            transcript.add_reply(reply.messages, added)
    first_turn = turns[0]
    last_turn = turns[-1]
    response_ids = np.concatenate(transcript.ids)
    rollout_logprobs = np.concatenate(transcript.logprobs)
    environment_turns = tuple(transcript.turns)
    answer_start = environment_turns[-1].answer_start
    return Rollout(
        prompt_id=prompt.prompt_id,
        sample_index=first_turn.sample_index,
        prompt_ids=prompt.prompt_ids,
        response_ids=response_ids,
        rollout_logprobs=rollout_logprobs,
        response_text=transcript.text,
        finish_reason=last_turn.finish_reason,
        policy_versions=tuple(transcript.versions),
        answer_start=answer_start,
        environment_turns=environment_turns,
        metrics=metrics,
        **ending,
    )


@dataclass(kw_only=True)
class _Transcript:
    """The part of a conversation that is joined so far; see the fields of `Rollout`."""

    text: str = ""
    num_tokens: int = 0
    ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    turns: list[PolicyTurn] = field(default_factory=list)

    def add_turn(self, turn: Rollout, reply: TurnReply) -> None:
        first_character = len(self.text)
        end = self.num_tokens + len(turn.response_ids)
        answer_start = None if turn.answer_start is None else first_character + turn.answer_start
        joined = PolicyTurn(
            tokens=(self.num_tokens, end),
            characters=(first_character, first_character + len(turn.response_text)),
            answer_start=answer_start,
            reply=reply.environment_reply.text,
            results=reply.results,
        )
        self.turns.append(joined)
        for first, last, version in turn.policy_versions:
            self.versions.append((self.num_tokens + first, self.num_tokens + last, version))
        self.text += turn.response_text
        self.ids.append(turn.response_ids)
        self.logprobs.append(turn.rollout_logprobs)
        self.num_tokens = end

    def add_reply(self, messages: Sequence[Message], added: np.ndarray) -> None:
        """Add a reply with its inserted tokens."""
        self.text += format_reply(messages)
        self.ids.append(added)
        self.logprobs.append(np.zeros(len(added), np.float32))
        self.num_tokens += len(added)
