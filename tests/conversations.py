"""Conversations of random letters, for tests of what they are trained on."""

from dataclasses import replace

import numpy as np
from fakes import FakeRollouts
from hypothesis import strategies as st

from t2g.interfaces import Sampling
from t2g.types import PolicyTurn, Prompt, Rollout


def make_conversation(
    turns: list[int], inserted: list[int], *, prompt_id: str = "p", sample_index: int = 0, seed: int = 0
) -> Rollout:
    """Return a conversation of `turns` sampled tokens each, with `inserted` tokens between two turns.

    A token is a letter of the transcript; the environment's messages stand in it as upper-case letters.
    """
    rng = np.random.default_rng(seed)
    parts = []
    text = ""
    ids = 0
    for number, length in enumerate(turns):
        tokens = (ids, ids + length)
        characters = (len(text), len(text) + length)
        parts.append(PolicyTurn(tokens=tokens, characters=characters, answer_start=len(text), reply="R"))
        gap = inserted[number] if number < len(turns) - 1 else 0
        text += "".join(rng.choice([*"abc"], length)) + "E" * gap
        ids += length + gap
    logprobs = rng.normal(-1, 0.3, ids).astype(np.float32)
    response_ids = rng.integers(0, 99, ids).astype(np.int32)
    versions = tuple((*part.tokens, 0) for part in parts)
    rollout = Rollout(
        prompt_id=prompt_id, sample_index=sample_index, prompt_ids=np.array([7], np.int32),
        response_ids=response_ids, rollout_logprobs=logprobs, response_text=text, finish_reason="stop",
        policy_versions=versions, answer_start=parts[-1].answer_start, environment_turns=tuple(parts),
    )  # fmt: skip
    logprobs[~rollout.policy_mask] = 0
    return rollout


@st.composite
def conversations(draw: st.DrawFn, *, prompt_id: str = "p", sample_index: int = 0) -> Rollout:
    turns = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    inserted = draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    return make_conversation(
        turns, inserted, prompt_id=prompt_id, sample_index=sample_index, seed=draw(st.integers(0, 99))
    )


class TwoTurns(FakeRollouts):
    """Conversations of two letters, one inserted letter, and a last one."""

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        turns = tuple(
            PolicyTurn(tokens=(a, b), characters=(a, b), answer_start=a, reply="c") for a, b in ((0, 2), (3, 4))
        )
        conversations = []
        for rollout in await super()._sample(prompt, sampling):
            text = rollout.response_text
            ids = rollout.response_ids.copy()
            logprobs = rollout.rollout_logprobs.copy()
            ids[2] = self.ids[2]
            logprobs[2] = 0
            versions = tuple(part for part in rollout.policy_versions if part[0] != 2)
            conversations.append(
                replace(
                    rollout, response_ids=ids, rollout_logprobs=logprobs, response_text=f"{text[:2]}c{text[3]}",
                    policy_versions=versions, answer_start=3, environment_turns=turns, metrics={"m": 1.0},
                )
            )  # fmt: skip
        return conversations
