"""Further prompts of a step, which replace prompts whose samples all earn the same (`rollout.resample_zero_groups`).

A comparison of samples learns nothing from a group that earns the same; only local credit does. DAPO (arXiv
2503.14476, section 3.2) samples further prompts until the batch is full; here their number is bounded. The rules:

    - A step has an order of further prompts, a function of (run.seed, step). None of them is among its own prompts.
    - The next one is drawn for each own prompt whose samples all earn the same, and for each further prompt that
      cannot replace one, up to `resample_zero_groups`.
    - The k-th further prompt with a difference replaces the k-th own prompt without one. Others stay.

The drawn prompts are the first ones of that order whatever group is judged first, so a resumed run draws the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from t2g.config import ObjectiveConfig, PolicyJob
from t2g.data.buffer import Group
from t2g.errors import UserError
from t2g.loop.step_advantages import zero_variance_share
from t2g.loop.steps import make_sampling_seed
from t2g.types import JudgedResponse, ScoredRollout

# variance of the returns of a prompt's usable samples; nonzero: at some token; undefined: fewer than two samples
RewardVariance = Literal["nonzero", "zero", "undefined"]


@dataclass(frozen=True, kw_only=True)
class FilteredGroups:
    """The judged groups of a step that are not trained on: zero-variance groups, and further ones of one sample."""

    responses: tuple[JudgedResponse, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)  # prompt_id -> why
    num_further: int = 0  # prompts that were drawn
    num_replaced: int = 0  # own prompts that they replaced


class StepGroups(NamedTuple):
    """The groups of a step."""

    trained: list[Group]  # in the order of the step's own prompts
    filtered: FilteredGroups


def check_further_prompts(config: PolicyJob, num_prompts: int) -> None:
    """Check that a step never needs a prompt twice.

    Raises:
        UserError: There are fewer prompts than a step may take.
    """
    rollout = config.rollout
    num_needed = rollout.prompts_per_step + rollout.resample_zero_groups
    if rollout.resample_zero_groups == 0 or num_prompts >= num_needed:
        return
    raise UserError(
        f"data.path has {num_prompts} prompts, and a step with rollout.prompts_per_step={rollout.prompts_per_step} and "
        f"rollout.resample_zero_groups={rollout.resample_zero_groups} may take {num_needed} different ones: add "
        "prompts, or lower one of the two"
    )


def order_further_prompts(
    own_indices: Sequence[int], *, num_prompts: int, step: int, seed: int, count: int
) -> list[int]:
    """Return the indices of the first `count` further prompts of a step, without those in `own_indices`."""
    rng = np.random.default_rng(make_sampling_seed(seed, "further prompts", step))
    order = rng.permutation(num_prompts).tolist()
    excluded = set(own_indices)
    others = [index for index in order if index not in excluded]
    return others[:count]


def find_reward_variance(scored: Sequence[ScoredRollout], objective: ObjectiveConfig, *, seed: int) -> RewardVariance:
    """Return the variance of the usable samples of one prompt, as `group/zero_variance_share` counts it."""
    if len(scored) < 2:
        return "undefined"
    share = zero_variance_share(scored, objective, seed=seed)
    return "zero" if share else "nonzero"


def needs_further_prompt(variance: RewardVariance, *, is_own: bool) -> bool:
    """Return whether a prompt is drawn because of a group of this variance.

    An own group whose feedback failed is the business of `feedback.max_failed_share`.
    """
    return variance == "zero" if is_own else variance != "nonzero"


def match_replacements(
    own_variances: Sequence[RewardVariance], further_variances: Sequence[RewardVariance]
) -> dict[int, int]:
    """Return for each own group that is replaced the index of the further group that takes its place.

    >>> match_replacements(["zero", "nonzero", "zero", "zero"], ["nonzero", "zero", "nonzero"])
    {0: 0, 2: 2}
    """
    without_variance = [index for index, variance in enumerate(own_variances) if variance == "zero"]
    with_variance = [index for index, variance in enumerate(further_variances) if variance == "nonzero"]
    return dict(zip(without_variance, with_variance, strict=False))


def replace_groups(
    own_groups: Sequence[Group], further: Sequence[Group], variances: Mapping[str, RewardVariance]
) -> StepGroups:
    """Return the groups of a step after replacement.

    Args:
        own_groups: Groups of the step's own prompts.
        further: Groups of the prompts that were drawn, in the order of their draw.
        variances: prompt_id -> variance of each group; not read without `further`.
    """
    if not further:
        return StepGroups([*own_groups], FilteredGroups())

    own_variances = [variances[group.prompt.prompt_id] for group in own_groups]
    further_variances = [variances[group.prompt.prompt_id] for group in further]
    replacements = match_replacements(own_variances, further_variances)

    trained: list[Group] = []
    filtered: list[Group] = []
    reasons: dict[str, str] = {}
    for index, group in enumerate(own_groups):
        if index not in replacements:
            trained.append(group)
            continue
        replacement = further[replacements[index]]
        trained.append(replacement)
        filtered.append(group)
        reasons[group.prompt.prompt_id] = f"all samples earn the same; replaced by {replacement.prompt.prompt_id}"

    used = set(replacements.values())
    for index, group in enumerate(further):
        if index in used or not group.samples:
            continue
        filtered.append(group)
        is_zero = further_variances[index] == "zero"
        lack = "all samples earn the same" if is_zero else "fewer than two samples are usable"
        reasons[group.prompt.prompt_id] = f"{lack}; drawn for rollout.resample_zero_groups"

    responses: list[JudgedResponse] = []
    for group in filtered:
        responses += list_responses(group)
    filtered_groups = FilteredGroups(
        responses=tuple(responses), reasons=reasons, num_further=len(further), num_replaced=len(replacements)
    )
    return StepGroups(trained, filtered_groups)


def list_responses(group: Group) -> list[JudgedResponse]:
    """Return the judged responses of a group."""
    return [JudgedResponse(group.prompt, rollout, feedback) for rollout, feedback in group.samples]
