"""What training changed, and where: log-probability of the base's own responses, by what the feedback said of a token.

The reference is one response of the base to each of some held-out prompts, with its feedback, made before any training.
Training that acts where the criticism points lowers the log-probability of criticised tokens and leaves those that were
never mentioned alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from t2g.config import RewardRuleConfig
from t2g.feedback import token_offsets
from t2g.feedback.rewards import token_rewards
from t2g.types import Prompt, Rollout, SpanFeedback, read_feedback

MENTIONS = {-1: "criticised", 1: "praised", 0: "unmentioned"}
_RULE = RewardRuleConfig()  # the job's own may pay nothing for some spans; they are criticism all the same


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One response of the base and what was said of it."""

    prompt: Prompt
    rollout: Rollout
    feedback: SpanFeedback


def reference_record(reference: Reference) -> dict[str, Any]:
    """As JSON, without the prompt but for its id; `read_reference` reads it."""
    rollout = reference.rollout
    return {
        "prompt_id": rollout.prompt_id,
        "response_ids": rollout.response_ids.tolist(),
        "rollout_logprobs": rollout.rollout_logprobs.tolist(),
        "response_text": rollout.response_text,
        "finish_reason": rollout.finish_reason,
        "feedback": asdict(reference.feedback),
    }


def read_reference(record: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> Reference:
    prompt = prompts[record["prompt_id"]]
    rollout = Rollout(
        prompt_id=prompt.prompt_id,
        sample_index=0,
        prompt_ids=prompt.prompt_ids,
        response_ids=np.array(record["response_ids"], np.int32),
        rollout_logprobs=np.array(record["rollout_logprobs"], np.float32),
        response_text=record["response_text"],
        finish_reason=record["finish_reason"],
        policy_versions=((0, len(record["response_ids"]), 0),),
    )
    return Reference(prompt=prompt, rollout=rollout, feedback=read_feedback(record["feedback"]))


def mentions(tokenizer: Any, rollout: Rollout, feedback: SpanFeedback) -> np.ndarray:
    """-> [R] int8: -1 criticised (also where it is praised as well), 1 praised, 0 never mentioned (EOS always)."""
    offsets = token_offsets(tokenizer, rollout.response_ids)
    deltas = token_rewards(offsets, feedback.spans, text=rollout.response_text, rule=_RULE)
    return np.sign(deltas).astype(np.int8)


def changes_by_mention(labels: Sequence[np.ndarray], changes: Sequence[np.ndarray]) -> dict[str, Any]:
    """Mean change of log-probability over the tokens of each kind, nats, with their number; None for a kind without.

    labels, changes: [R] each, of the same responses. `difference` is criticised less unmentioned: below 0 where
    training turned against what was criticised, and not against everything.

        labels [-1, 0, 0], changes [-2, .5, -.5] -> criticised -2, praised None, unmentioned 0, difference -2
    """
    label, change = np.concatenate(labels), np.concatenate(changes)
    of = {name: change[label == value] for value, name in MENTIONS.items()}
    means = {name: float(part.mean()) if part.size else None for name, part in of.items()}
    criticised, unmentioned = means["criticised"], means["unmentioned"]
    difference = None if criticised is None or unmentioned is None else criticised - unmentioned
    return {**means, "difference": difference, "tokens": {name: int(part.size) for name, part in of.items()}}


def criticisms(response_text: str, feedback: SpanFeedback) -> frozenset[str] | None:
    """The quotes that are called poor, each once; None where the feedback is of no use."""
    if not feedback.usable:
        return None
    return frozenset(response_text[span.start : span.end] for span in feedback.spans if span.label < 0)


def returns(before: Sequence[frozenset[str] | None], after: Sequence[frozenset[str] | None]) -> dict[str, Any]:
    """Of the criticisms of the base's responses, the share that is made of the new ones to the same prompts as well.

    before, after: by prompt; a prompt without usable feedback on both sides does not count.

        before [{Lima, laptop}, {Ann}], after [{Lima}, {}] -> 1 of 3
    """
    both = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    count = sum(len(old) for old, _ in both)
    again = sum(len(old & new) for old, new in both)
    return {"returns": again / count if count else None, "criticisms": count, "prompts": len(both)}
