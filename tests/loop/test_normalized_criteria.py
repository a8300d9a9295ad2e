"""objective.normalize_criteria in a step: scales, constant and missing criteria, GDPO, and training with it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import letter_tokenizer
from pydantic import ValidationError
from trainer_bench import Bench, job

from t2g.config import ObjectiveConfig, PolicyJob, with_overrides
from t2g.errors import RunStopped
from t2g.feedback.parse import make_feedback
from t2g.feedback.sources.combined import make_source
from t2g.feedback.sources.make import make_local_source
from t2g.loop.step_advantages import compute_advantages, zero_variance_share
from t2g.loop.steps import check_finite
from t2g.report.run_page import report_run
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import CriterionRewards, Rollout, ScoredRollout, TokenStats

FEEDBACK = make_feedback("", [], [], "", source="program", version="")
WEIGHTS = {"facts": 1.0, "style": 0.5}


def make_scored(
    prompt_id: str, rewards: Mapping[str, list[float]], length: int, outcomes: Mapping[str, float] | None = None
) -> ScoredRollout:
    ids = np.arange(length, dtype=np.int32)
    zeros = np.zeros(length, np.float32)
    rollout = Rollout(
        prompt_id=prompt_id,
        sample_index=0,
        prompt_ids=ids[:1],
        response_ids=ids,
        rollout_logprobs=zeros,
        response_text="x" * length,
        finish_reason="stop",
        policy_versions=((0, length, 0),),
    )
    total = zeros.copy()
    criteria: dict[str, CriterionRewards] = {}
    for name, row in rewards.items():
        criterion_rewards = np.array(row, np.float32)
        total += WEIGHTS[name] * criterion_rewards
        criteria[name] = CriterionRewards(
            token_rewards=criterion_rewards, span_values=criterion_rewards, weight=WEIGHTS[name]
        )
    return ScoredRollout(
        rollout=rollout,
        feedback=replace(FEEDBACK, outcomes=dict(outcomes or {})),
        token_rewards=total,
        span_values=total,
        sentence_ids=np.zeros(length, np.int32),
        answer_mask=rollout.policy_mask,
        criteria=criteria,
    )


def draw_step(seed: int = 0, *, scale: float = 1.0, num_prompts: int = 3, **outcomes: float) -> list[ScoredRollout]:
    """Return four samples of each prompt; `style` times `scale`, and an outcome times its factor."""
    rng = np.random.default_rng(seed)
    scored = []
    for prompt in range(num_prompts):
        for _ in range(4):
            length = int(rng.integers(2, 7))
            facts = rng.integers(-1, 2, length).tolist()
            style = (scale * rng.integers(-2, 3, length)).tolist()
            number = float(rng.normal())
            numbers = {name: factor * number for name, factor in outcomes.items()}
            scored.append(make_scored(f"p{prompt}", {"facts": facts, "style": style}, length, numbers))
    return scored


def advantages_of(scored: list[ScoredRollout], **objective: Any) -> torch.Tensor:
    config = ObjectiveConfig.model_validate({"normalize_criteria": True} | objective)
    stats = []
    for response in scored:
        zeros = np.zeros(len(response.token_rewards), np.float32)
        stats.append(TokenStats(old_logprobs=zeros, ref_logprobs=zeros, values=zeros, entropy=zeros))
    return compute_advantages(scored, stats, config, kl_coef=0.0, seed=1).advantages


@pytest.mark.parametrize("placement", ["span", "step", "scalar", "shuffled"])
@pytest.mark.parametrize("advantages", ["group", "group_normalised"])
def test_the_scale_of_a_criterion_changes_nothing(placement: str, advantages: str) -> None:
    objective = {"rewards": {"placement": placement}, "advantages": advantages, "local_coef": 0.3}
    plain = advantages_of(draw_step(), **objective)
    for scale in (100, 0.01):
        torch.testing.assert_close(advantages_of(draw_step(scale=scale), **objective), plain, rtol=1e-4, atol=1e-5)
    unscaled = advantages_of(draw_step(scale=100), **objective | {"normalize_criteria": False})
    assert not torch.allclose(unscaled, plain, atol=0.1)


def test_the_scale_of_a_number_changes_nothing_and_its_weight_does() -> None:
    def paid(factor: float, weight: float = 1.0) -> torch.Tensor:
        outcome_rewards = [{"source": "metric:tone", "weight": weight}]
        return advantages_of(draw_step(**{"metric:tone": factor}), outcome_rewards=outcome_rewards)

    torch.testing.assert_close(paid(100.0), paid(1.0), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(paid(1.0, weight=5.0), paid(1.0), atol=0.1)


def test_numbers_alone_are_gdpo() -> None:
    """GDPO: each reward by its mean and deviation in the group, their weighted sum by those of the batch."""
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=(8, 2)) * [1, 100] + [0, 7]
    weights = [1.0, -0.5]
    scored = []
    for row, (first, second) in enumerate(numbers):
        outcomes = {"metric:a": first, "metric:b": second}
        scored.append(make_scored(f"p{row // 4}", {}, 3, outcomes))
    entries = [{"source": f"metric:{name}", "weight": weight} for name, weight in zip("ab", weights, strict=True)]
    advantages = advantages_of(scored, outcome_rewards=entries, span_coef=0, whiten="full")
    grouped = numbers.reshape(2, 4, 2)
    each = (grouped - grouped.mean(1, keepdims=True)) / grouped.std(1, keepdims=True)
    total = (each * weights).sum(2).reshape(8)
    expected = (total - total.mean()) / total.std()
    np.testing.assert_allclose(advantages.numpy(), np.repeat(expected[:, None], 3, axis=1), atol=1e-5)


def test_a_criterion_that_is_constant_in_a_prompt_gives_nothing_there() -> None:
    scored = draw_step()
    for number in range(4):
        length = len(scored[number].token_rewards)
        same = [0.0] * (length - 1) + [1.0]
        scored[number] = make_scored("p0", {"facts": same, "style": same}, length)
    advantages = advantages_of(scored)
    assert torch.isfinite(advantages).all()
    assert not advantages[:4].any()
    assert advantages[4:].any()
    assert zero_variance_share(scored, ObjectiveConfig(normalize_criteria=True), seed=1) == pytest.approx(1 / 3)


def test_a_missing_criterion_touches_no_other_criterion_and_no_other_prompt() -> None:
    objective = {"whiten": "none", "local_coef": 0}
    scored = draw_step()
    lacking = [*scored]
    facts = {"facts": scored[0].criteria["facts"]}
    lacking[0] = replace(scored[0], criteria=facts)
    every = advantages_of(scored, **objective)
    some = advantages_of(lacking, **objective)
    torch.testing.assert_close(some[4:], every[4:])
    alone = [replace(response, criteria={"facts": response.criteria["facts"]}) for response in scored]
    length = len(scored[0].token_rewards)
    torch.testing.assert_close(some[0, :length], advantages_of(alone, **objective)[0, :length])


def test_a_number_that_is_nan_stops_the_run_with_a_sentence() -> None:
    scored = replace(draw_step()[0], outcome_reward=float("nan"))
    zeros = np.zeros(len(scored.token_rewards), np.float32)
    stats = TokenStats(old_logprobs=zeros, ref_logprobs=zeros, values=zeros, entropy=zeros)
    with pytest.raises(RunStopped, match="step 3: prompt p0, sample 0: the outcome reward of token"):
        check_finite(3, [scored], [stats])


@pytest.mark.parametrize("change", [{"advantages": "gae"}, {"values": "span"}, {"values": "sentence"}])
def test_where_prompts_share_no_scale_it_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="normalize_criteria has a scale for each prompt"):
        ObjectiveConfig.model_validate({"normalize_criteria": True} | change)


def letters(prompt: str, response: str) -> Any:
    return "a", [("a", number + 1) for number in range(response.count("a"))], []


def unsure_opposite(prompt: str, response: str) -> Any:
    pieces = [{"quote": "a", "occurrence": number + 1, "confidence": 0.25} for number in range(response.count("a"))]
    return "no a", [], pieces


def no_c(prompt: str, response: str) -> Any:
    return ("a", [], []) if "c" not in response else None


def run(folder: Path, tokenizer: Any, sources: dict[str, Any], **objective: Any) -> Bench:
    changes: dict[str, Any] = {"num_steps": 2, "feedback": {"sources": sources}}
    changes |= {f"objective.{key}": value for key, value in objective.items()}
    config: PolicyJob = with_overrides(job(), changes)
    bench = Bench(folder, tokenizer, config)
    local = make_source(config.feedback, lambda one, section: make_local_source(one, PromptsTask(), section=section))
    bench.trainer.feedback = bench.trainer.train_feedback = local
    bench.run()
    return bench


def test_a_quarter_of_the_confidence_has_the_same_influence(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path / "tokenizer")
    sources: dict[str, Any] = {
        "yes": {"source": f"{__name__}:letters"},
        "no": {"source": f"{__name__}:unsure_opposite"},
    }
    raw = run(tmp_path / "raw", tokenizer, sources, kl_coef=0.0)
    even = run(tmp_path / "even", tokenizer, sources, kl_coef=0.0, normalize_criteria=True)
    initial = Bench(tmp_path / "initial", tokenizer, with_overrides(job(), {"num_steps": 2})).learner.logits.detach()
    raw_change = (raw.learner.logits.detach() - initial).abs().max()
    even_change = (even.learner.logits.detach() - initial).abs().max()
    assert raw_change > 0.01
    assert even_change == 0  # the criteria cancel
    assert '"confidence": 0.25' in (tmp_path / "even" / "samples.jsonl").read_text()
    assert "✗ no 0.25</sup>" in report_run(tmp_path / "even").read_text()


def test_a_criterion_that_fails_on_some_responses_is_no_error(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path / "tokenizer")
    sources: dict[str, Any] = {
        "yes": {"source": f"{__name__}:letters"},
        "c": {"source": f"{__name__}:no_c", "required": False},
    }
    metrics = run(tmp_path / "run", tokenizer, sources, normalize_criteria=True).metrics()
    assert 0 < metrics[-1]["criterion_failed/c"] < 1
    assert np.isfinite(metrics[-1]["policy/loss"])
