"""One conversation: the policy's turns, the environment's replies, and the rollout that they make.

Sampled ids are never tokenized again. A reply is encoded as what the chat template adds for it to a fixed dummy
conversation: a template that rewrites earlier messages, as those of thinking models do, does not change what was
sampled, and earlier thinking stays.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from t2g.environments.environment import Environment, Reply
from t2g.errors import UserError
from t2g.feedback.sources.user_function import FunctionFailed
from t2g.text.tokenizer import Message, chat_renderer, encode_texts
from t2g.text.transcript import AFTER_REPLY, BEFORE_REPLY
from t2g.types import PolicyTurn, Prompt, Rollout

DUMMY_ANSWER = "t2g-dummy-answer"
DUMMY: tuple[Message, ...] = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": DUMMY_ANSWER},
)

# Context [P] and number of the turn, 0, 1, ... -> the turn.
SampleTurn = Callable[[np.ndarray, int], Awaitable[Rollout]]
# Reply, and the ids of the turn before it -> inserted ids.
EncodeReply = Callable[[str, np.ndarray], np.ndarray]


def make_encoder(tokenizer: Any) -> EncodeReply:
    """Return the function that encodes a reply: from the end of the turn before it to the start of the next turn.

    A turn that ends with the token that the template puts there is not ended twice.

    Raises:
        UserError: The tokenizer has no chat template, or its template leaves out earlier answers.
    """
    render = chat_renderer(tokenizer)

    def encode(reply: str, turn_ids: np.ndarray) -> np.ndarray:
        message = {"role": "user", "content": reply}
        text = render([*DUMMY, message])
        _, separator, added = text.partition(DUMMY_ANSWER)
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

    encode("Hello", np.zeros(0, np.int32))
    return encode


async def converse(
    prompt: Prompt,
    sample_turn: SampleTurn,
    environment: Environment,
    encode: EncodeReply,
    *,
    max_turns: int,
    max_context_tokens: int,
) -> Rollout:
    """Return the conversation that starts with a prompt.

    It ends when the environment is done or fails, after `max_turns`, with a turn that is truncated or has no answer,
    and when the next turn would not fit into the window.

    Args:
        max_context_tokens: A turn of full length fits after them.

    Raises:
        RunStopped: As `Environment.reply`.
    """
    context = prompt.prompt_ids
    messages: list[Message] = []
    turns: list[Rollout] = []
    replies: list[Reply] = []
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
            reply = await environment.reply(prompt, messages)
        except FunctionFailed as failed:
            failure = str(failed)
            break
        replies.append(reply)
        if reply.done or turn.is_truncated or len(turns) == max_turns:
            break
        added = encode(reply.text, turn.response_ids)
        context = np.concatenate([context, turn.response_ids, added])
        is_window_full = len(context) > max_context_tokens
        if is_window_full:
            break
        inserted.append(added)
        messages.append({"role": "user", "content": reply.text})
    return join_turns(prompt, turns, replies, inserted, failure=failure, is_window_full=is_window_full)


def join_turns(
    prompt: Prompt, turns: Sequence[Rollout], replies: Sequence[Reply], inserted: Sequence[np.ndarray], **ending: Any
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
        transcript.add_turn(turn, reply.text if reply else "")
        if reply:
            metrics |= reply.metrics
        if added is not None:
            transcript.add_reply(reply.text, added)
    first_turn = turns[0]
    last_turn = turns[-1]
    response_ids = np.concatenate(transcript.ids)
    rollout_logprobs = np.concatenate(transcript.logprobs)
    conversation = tuple(transcript.turns)
    answer_start = conversation[-1].answer_start
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
        conversation=conversation,
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

    def add_turn(self, turn: Rollout, reply_text: str) -> None:
        first_character = len(self.text)
        end = self.num_tokens + len(turn.response_ids)
        answer_start = None if turn.answer_start is None else first_character + turn.answer_start
        joined = PolicyTurn(
            tokens=(self.num_tokens, end),
            characters=(first_character, first_character + len(turn.response_text)),
            answer_start=answer_start,
            reply=reply_text,
        )
        self.turns.append(joined)
        for first, last, version in turn.policy_versions:
            self.versions.append((self.num_tokens + first, self.num_tokens + last, version))
        self.text += turn.response_text
        self.ids.append(turn.response_ids)
        self.logprobs.append(turn.rollout_logprobs)
        self.num_tokens = end

    def add_reply(self, text: str, added: np.ndarray) -> None:
        """Add a reply with its inserted tokens."""
        self.text += f"{BEFORE_REPLY}{text}{AFTER_REPLY}"
        self.ids.append(added)
        self.logprobs.append(np.zeros(len(added), np.float32))
        self.num_tokens += len(added)
