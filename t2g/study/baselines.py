"""The baselines of method.md, section 5, without their engines: pairs for DPO, revisions for ILF and reflection.

Everything is measured by the summed delta of a response, which is what scalar PPO pays: the same information.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import ceil
from typing import Any, Literal

import numpy as np

from t2g.config import PolicyJob, RewardRuleConfig, RoleConfig, RolloutConfig, SFTLoRAConfig, SFTOptions, with_overrides
from t2g.errors import UserError
from t2g.feedback import token_offsets, token_rewards
from t2g.feedback.examples import SFTExample, sft_example, target_ids
from t2g.feedback.records import AnnotatedRecord
from t2g.loop.sampling import JudgedResponse
from t2g.tasks.base import Task
from t2g.text.tokenizer import fit_chat
from t2g.types import Prompt, Rollout, SpanFeedback

Baseline = Literal["reflection", "dpo", "ilf"]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A response with usable feedback and what it is worth."""

    prompt: Prompt
    rollout: Rollout
    feedback: SpanFeedback
    delta: float  # sum of its token rewards


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """What DPO learns from: the sampled ids, never text that was encoded again."""

    prompt_ids: np.ndarray  # [P] int32
    chosen_ids: np.ndarray  # [R] int32
    rejected_ids: np.ndarray  # [R'] int32


def check(method: Baseline, job: PolicyJob) -> None:
    """UserError, before any engine starts, for settings with which the method makes no sense."""
    if method in ("dpo", "ilf") and job.rollout.samples_per_prompt < 2:
        needs = {"dpo": "two responses to compare", "ilf": "a response and a revision of it"}[method]
        raise UserError(f"{method} needs {needs}: rollout.samples_per_prompt is 1; set it to 2 or more")
    if method != "dpo" and not job.feedback.style.critique:
        raise UserError(f"{method} shows the critique to a model, and feedback.style.critique=false has none")
    if job.eval_data is None:
        raise UserError(f"{method} is measured on held-out prompts; eval_data is missing")
    if method != "reflection" and job.objective.w_end > 0:
        raise UserError(
            f"{method} ranks responses by their spans alone, and objective.w_end={job.objective.w_end:g} pays for "
            "more: set it to 0, or leave the method out"
        )
    if method == "dpo" and job.learner.offload != "none":
        raise UserError(
            f"learner.offload={job.learner.offload} is ZeRO-3's, and dpo trains in one process; set it to none"
        )
    if method == "dpo" and find_spec("trl") is None:
        raise UserError("dpo needs the package trl, which is not installed: install the extra `baselines`")


def score(pairs: Sequence[JudgedResponse], tokenizer: Any, rule: RewardRuleConfig) -> list[Scored]:
    """Each response with its summed delta. tokenizer: of the model that wrote them."""
    scored = []
    for prompt, rollout, feedback in pairs:
        offsets = token_offsets(tokenizer, rollout.response_ids)
        deltas = token_rewards(offsets, feedback.spans, text=rollout.response_text, rule=rule)
        scored.append(Scored(prompt=prompt, rollout=rollout, feedback=feedback, delta=float(deltas.sum())))
    return scored


# ----------------------------------------------------------------------------------------------------------------- dpo
def preference_pairs(scored: Iterable[Scored]) -> tuple[list[PreferencePair], int]:
    """Of each prompt's responses the best with the worst, the second best with the second worst, and so on; and the
    number of pairs that are left out since both are worth the same.

    A response stands in one pair at most, so that a pass over the pairs is a pass over the samples. Of equals the
    earlier sample comes first; the middle one of an odd number has no partner.

    Deltas 2, 0, 1, 0 -> (2, 0), (1, 0); deltas 1, 1 -> no pair, one tie.
    """
    groups: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[one.prompt.prompt_id].append(one)
    pairs, ties = [], 0
    for group in groups.values():
        ranking = sorted(group, key=lambda one: -one.delta)  # stable
        for chosen, rejected in zip(ranking[: len(ranking) // 2], reversed(ranking), strict=False):
            if chosen.delta == rejected.delta:
                ties += 1
                continue
            pairs.append(
                PreferencePair(
                    prompt_ids=chosen.prompt.prompt_ids,
                    chosen_ids=chosen.rollout.response_ids,
                    rejected_ids=rejected.rollout.response_ids,
                )
            )
    return pairs, ties


# ------------------------------------------------------------------------------------------------- ilf and reflection
def revision_prompt(task: Task, judged: JudgedResponse, tokenizer: Any, max_prompt_tokens: int) -> Prompt | None:
    """What asks for the response again, with the critique in view; None where there is no critique, or no room for it.

    A prompt too long loses input text, never the response or the critique. tokenizer: of the model that is asked.
    """
    prompt, rollout, feedback = judged
    if not feedback.usable or not feedback.critique.strip():
        return None
    ids = _revision_ids(task, prompt, rollout.response_text, feedback.critique, tokenizer, max_prompt_tokens)
    if ids is None:
        return None
    # A prompt may have several responses: the revisions of each are sampled with a seed of their own.
    return replace(prompt, prompt_id=f"{prompt.prompt_id}/{rollout.sample_index}", prompt_ids=ids)


def _revision_ids(
    task: Task, prompt: Prompt, response_text: str, critique: str, tokenizer: Any, max_prompt_tokens: int
) -> np.ndarray | None:
    ids = fit_chat(
        lambda limit: task.revise_messages(prompt, response_text, critique, limit),
        tokenizer,
        max_prompt_tokens,
        input_chars=len(prompt.prompt_text),
    )
    return None if ids is None else np.asarray(ids, np.int32)


def best_of_each(scored: Iterable[Scored]) -> list[Scored]:
    """Each prompt's response with the highest delta, the earliest of equals, in the order of the prompts."""
    best: dict[str, Scored] = {}
    for one in scored:
        if one.delta > best.setdefault(one.prompt.prompt_id, one).delta:
            best[one.prompt.prompt_id] = one
    return list(best.values())


def imitation_examples(best: Sequence[Scored], tokenizer: Any) -> list[SFTExample]:
    """The policy's own prompts with the revised responses as targets; the reviser's tokenizer may be another one."""
    targets = [target_ids(one.rollout.response_text, tokenizer) for one in best]
    return [
        SFTExample(prompt_ids=one.prompt.prompt_ids, target_ids=ids, target_weights=np.ones(len(ids), np.float32))
        for one, ids in zip(best, targets, strict=True)
    ]


def revision_examples(
    records: Sequence[AnnotatedRecord],
    task: Task,
    tokenizer: Any,
    revise: Callable[[AnnotatedRecord], tuple[str, str]],
    *,
    max_length: int,
) -> list[SFTExample]:
    """What teaches a model to revise: `revise(record)` gives the critique that is shown and the response to write."""
    examples = []
    for record in records:
        critique, target = revise(record)

        def build(room: int, record: AnnotatedRecord = record, critique: str = critique) -> np.ndarray:
            ids = _revision_ids(task, record.to_prompt(), record.response, critique, tokenizer, room)
            if ids is None:
                raise UserError(f"the revision of prompt {record.prompt_id} does not fit into {max_length} tokens")
            return ids

        examples.append(sft_example(build, target, tokenizer, max_length=max_length))
    return examples


# ------------------------------------------------------------------------------------------------------------- settings
def batch_size(job: PolicyJob, num_items: int) -> int:
    """Items of one optimizer step: a pass over them has as many steps as PPO makes in a pass over its samples."""
    return ceil(num_items / (job.num_steps * job.learner.minibatches_per_epoch))


def sft_options(job: PolicyJob, num_examples: int) -> SFTOptions:
    """Supervised training with the learner's resources, optimizer and passes."""
    learner = job.learner
    shared = {"dtype", "num_epochs", "tokens_per_microbatch", "gradient_checkpointing", "offload"}
    return SFTOptions(
        **learner.model_dump(include=shared | RoleConfig.model_fields.keys()),
        optim=learner.policy,
        batch_size=batch_size(job, num_examples),
        lora=SFTLoRAConfig(**learner.lora.model_dump(), dropout=0) if learner.lora else None,
        timeout_s=learner.step_timeout_s,
    )


def revising_rollout(job: PolicyJob) -> RolloutConfig:
    """Engines with room for a critique beside prompt and response: as much as the feedback's engines have for all."""
    window = job.rollout.max_model_len + job.feedback.engine.max_model_len
    return with_overrides(job.rollout, {"max_model_len": window})
