"""One conversation: the policy's turns, the environment's replies, and the rollout that they make.

Sampled ids are never tokenised again. A reply is encoded as what the chat template adds for it to a fixed dummy
conversation: a template that rewrites earlier messages, as those of thinking models do, does not change what was
sampled, and earlier thinking stays.
"""

from collections.abc import Awaitable, Callable, Sequence
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
        text = render([*DUMMY, {"role": "user", "content": reply}])
        _, found, added = text.partition(DUMMY_ANSWER)
        if not found:
            name = tokenizer.name_or_path
            raise UserError(f"environment: the chat template of {name} leaves out earlier answers; take another model")
        num_blanks = len(added) - len(added.lstrip())  # some templates put blanks before the end of a turn
        by_start = [
            np.asarray(row, np.int32) for row in encode_texts(tokenizer, [added[i:] for i in range(num_blanks + 1)])
        ]
        ends = (ids[1:] for ids in by_start if np.array_equal(ids[:1], turn_ids[-1:]))
        return next(ends, by_start[0])

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
    context, messages = prompt.prompt_ids, list[Message]()
    turns, replies, inserted, failure, is_window_full = list[Rollout](), list[Reply](), list[np.ndarray](), "", False
    while True:
        turn = await sample_turn(context, len(turns))
        turns.append(turn)
        messages.append({"role": "assistant", "content": turn.answer})
        if turn.answer_start is None:
            break
        try:
            replies.append(await environment.reply(prompt, messages))
        except FunctionFailed as failed:
            failure = str(failed)
            break
        if replies[-1].done or turn.is_truncated or len(turns) == max_turns:
            break
        added = encode(replies[-1].text, turn.response_ids)
        context = np.concatenate([context, turn.response_ids, added])
        if is_window_full := len(context) > max_context_tokens:
            break
        inserted.append(added)
        messages.append({"role": "user", "content": replies[-1].text})
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
    ids, logprobs, text = list[np.ndarray](), list[np.ndarray](), ""
    conversation, versions, num_tokens = list[PolicyTurn](), list[tuple[int, int, int]](), 0
    for turn, reply, added in zip_longest(turns, replies, inserted):
        end, start = num_tokens + len(turn.response_ids), turn.answer_start
        conversation.append(
            PolicyTurn(
                tokens=(num_tokens, end),
                characters=(len(text), len(text) + len(turn.response_text)),
                answer_start=None if start is None else len(text) + start,
                reply=reply.text if reply else "",
            )
        )
        versions += [(num_tokens + first, num_tokens + last, v) for first, last, v in turn.policy_versions]
        text += turn.response_text
        ids.append(turn.response_ids)
        logprobs.append(turn.rollout_logprobs)
        if added is not None:
            text += f"{BEFORE_REPLY}{reply.text}{AFTER_REPLY}"
            ids.append(added)
            logprobs.append(np.zeros(len(added), np.float32))
            end += len(added)
        num_tokens = end
    return Rollout(
        prompt_id=prompt.prompt_id,
        sample_index=turns[0].sample_index,
        prompt_ids=prompt.prompt_ids,
        response_ids=np.concatenate(ids),
        rollout_logprobs=np.concatenate(logprobs),
        response_text=text,
        finish_reason=turns[-1].finish_reason,
        policy_versions=tuple(versions),
        answer_start=conversation[-1].answer_start,
        conversation=tuple(conversation),
        metrics={name: value for reply in replies for name, value in reply.metrics.items()},
        **ending,
    )
