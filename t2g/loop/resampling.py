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
from t2g.loop.steps import sampling_seed
from t2g.types import JudgedResponse, ScoredRollout

# differs, equal: what the usable samples of a prompt earn, at some token or at every one; none: fewer than two samples
Signal = Literal["differs", "equal", "none"]


@dataclass(frozen=True, kw_only=True)
class FilteredGroups:
    """The judged groups of a step that are not trained on: zero-variance groups, and further ones with one sample."""

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
    rng = np.random.default_rng(sampling_seed(seed, "further prompts", step))
    order = rng.permutation(num_prompts).tolist()
    excluded = set(own_indices)
    others = [index for index in order if index not in excluded]
    return others[:count]


def find_signal(scored: Sequence[ScoredRollout], objective: ObjectiveConfig, *, seed: int) -> Signal:
    """Return what a comparison of the usable samples of one prompt finds, as `group/zero_variance_share` counts it."""
    if len(scored) < 2:
        return "none"
    share = zero_variance_share(scored, objective, seed=seed)
    return "equal" if share else "differs"


def needs_further_prompt(signal: Signal, *, is_own: bool) -> bool:
    """Return whether a prompt is drawn because of a group of this signal.

    An own group whose feedback failed is the business of `feedback.max_failed_share`.
    """
    return signal == "equal" if is_own else signal != "differs"


def match_replacements(own_signals: Sequence[Signal], further_signals: Sequence[Signal]) -> dict[int, int]:
    """Return for each own group that is replaced the index of the further group that takes its place.

    >>> match_replacements(["equal", "differs", "equal", "equal"], ["differs", "equal", "differs"])
    {0: 0, 2: 2}
    """
    without_signal = [index for index, signal in enumerate(own_signals) if signal == "equal"]
    with_signal = [index for index, signal in enumerate(further_signals) if signal == "differs"]
    return dict(zip(without_signal, with_signal, strict=False))


def replace_groups(own_groups: Sequence[Group], further: Sequence[Group], signals: Mapping[str, Signal]) -> StepGroups:
    """Return the groups of a step after replacement.

    Args:
        own_groups: Groups of the step's own prompts.
        further: Groups of the prompts that were drawn, in the order of their draw.
        signals: prompt_id -> signal of each group; not read without `further`.
    """
    if not further:
        return StepGroups([*own_groups], FilteredGroups())

    own_signals = [signals[group.prompt.prompt_id] for group in own_groups]
    further_signals = [signals[group.prompt.prompt_id] for group in further]
    replacements = match_replacements(own_signals, further_signals)

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
        is_equal = further_signals[index] == "equal"
        lack = "all samples earn the same" if is_equal else "fewer than two samples are usable"
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
