"""Exam of silent failures: rewards and feedback that teach nothing, or something else."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import letter_tokenizer
from pydantic import ValidationError
from trainer_bench import Bench, chosen, job, task_reward

from t2g.config import AlarmConfig, with_overrides
from t2g.errors import RunStopped
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.loop.alarms import find_alarms
from t2g.types import Prompt, SpanFeedback

SHORT = {"num_steps": 2, "eval.every": 9}
SAME_ALARM = "of the different responses was the same for 3 steps"
Judgement = tuple[str, list[tuple[str, int]], list[tuple[str, int]]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def one_short(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions[1:]]


def one_number(completions: list[str]) -> list[float]:
    return [1.0]


def one_nan(completions: list[str]) -> list[float]:
    return [float("nan"), *(1.0 for _ in completions[1:])]


def all_none(completions: list[str]) -> list[None]:
    return [None for _ in completions]


def some_none(completions: list[str]) -> list[float | None]:
    return [float(text.count("a")) if "a" in text else None for text in completions]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (one_short, "returned 3 numbers for 4 completions; it needs to return one for each"),
        (one_number, "returned 1 numbers for 4 completions; it needs to return one for each"),
        (one_nan, "returned nan among its numbers; it needs finite numbers, or None"),
        (all_none, "no source of objective.outcome_rewards applies, and objective.span_coef=0 pays nothing else"),
    ],
)
def test_rewards_that_are_none_nan_or_one_short_stop_the_run(
    function: Callable[..., Any], reason: str, tokenizer: Any, tmp_path: Path
) -> None:
    sources = [{"source": f"{__name__}:{function.__name__}"}]
    bench = Bench(tmp_path, tokenizer, with_overrides(job(span_coef=0.0, outcome_rewards=sources), SHORT))
    with pytest.raises(RunStopped, match=r"step 1: 32 of 32 samples have no usable feedback .*; the first: ") as stop:
        bench.run()
    assert reason in str(stop.value)
    dropped = bench.dropped()
    assert len(dropped) == 32
    assert all(reason in line["reason"] for line in dropped)
    assert bench.learner.batches == []


def test_responses_without_a_number_are_left_out_and_the_others_are_trained(tokenizer: Any, tmp_path: Path) -> None:
    sources = [{"source": f"{__name__}:some_none"}]
    config = with_overrides(job(span_coef=0.0, outcome_rewards=sources), SHORT | {"feedback.max_failed_share": 1.0})
    bench = Bench(tmp_path, tokenizer, config)
    bench.run()
    first = bench.metrics()[1]
    num_dropped = len([line for line in bench.dropped() if line["step"] == 1])
    assert first["dropped/samples"] == num_dropped > 0
    for batch in bench.learner.batches:
        for sample in chain.from_iterable(batch.minibatches):
            assert bench.rollouts.ids[0] in sample.response_ids
            assert np.isfinite(sample.advantages).all()


def test_one_sample_a_prompt_is_refused_where_samples_are_compared() -> None:
    with pytest.raises(ValidationError, match=r"rollout\.samples_per_prompt is 1 and needs to be 2"):
        job(samples_per_prompt=1, advantages="group")


def test_equal_rewards_make_every_advantage_zero_and_raise_an_alarm(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, with_overrides(job(), SHORT))
    bench.feedback.silent = lambda prompt: True
    bench.run()
    assert [step["tokens/zero_advantage_share"] for step in bench.metrics()[1:]] == [1, 1]
    assert bench.alarms("every advantage of the step is 0") == [1]
    assert bench.alarms("the samples of 100% of the prompts all earn the same at every token") == [1]


def test_prompts_with_one_usable_response_make_every_advantage_zero(tokenizer: Any, tmp_path: Path) -> None:
    config = job(span_coef=0.0, outcome_rewards=task_reward())
    bench = Bench(tmp_path, tokenizer, with_overrides(config, SHORT | {"feedback.max_failed_share": 1.0}))
    judge = bench.feedback.judge
    num_judged: Counter[str] = Counter()

    async def judge_first(prompt: Prompt, response_text: str) -> SpanFeedback:
        num_judged[prompt.prompt_id] += 1
        if num_judged[prompt.prompt_id] % 4 == 1:
            return await judge(prompt, response_text)
        return make_failed_feedback("failed", source="program", version="fake")

    bench.feedback.judge = judge_first  # type: ignore[method-assign]
    bench.run()
    first = bench.metrics()[1]
    assert "group/zero_variance_share" not in first, "there is no group"
    assert first["tokens/zero_advantage_share"] == 1
    assert bench.alarms("every advantage of the step is 0") == [1]


def test_a_group_that_carries_nothing_is_counted_and_has_no_loss(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, with_overrides(job(), SHORT))
    silent = set(chosen(1)[:3])
    bench.feedback.silent = lambda prompt: prompt.prompt_id in silent
    bench.run()
    first = bench.metrics()[1]
    assert first["group/zero_variance_share"] == 3 / 8
    (batch, *_) = bench.learner.batches
    first_epoch = chain.from_iterable(batch.minibatches[:2])
    num_without = sum(not sample.advantages.any() for sample in first_epoch)
    assert num_without == 3 * 4
    assert first["tokens/zero_advantage_share"] == pytest.approx(3 / 8, abs=0.05)


def says_nothing(text: str) -> Judgement:
    return "nothing", [], []


def praises_all(text: str) -> Judgement:
    return "It is good.", [(text, 1)], []


def quotes_letters(text: str) -> Judgement:
    good = [("a", number) for number in range(1, text.count("a") + 1)]
    return "It is good.", good, []


@pytest.mark.parametrize(
    ("judge", "prompts_per_step", "steps"),
    [(says_nothing, 8, [3]), (praises_all, 8, [3]), (quotes_letters, 8, []), (says_nothing, 1, [])],
)
def test_a_judge_that_answers_the_same_for_everything_raises_an_alarm(
    judge: Callable[[str], Judgement], prompts_per_step: int, steps: list[int], tokenizer: Any, tmp_path: Path
) -> None:
    """After three steps, once, and not where a step has few responses."""
    config = with_overrides(job(), {"num_steps": 5, "eval.every": 9, "rollout.prompts_per_step": prompts_per_step})
    bench = Bench(tmp_path, tokenizer, config)

    async def judge_text(prompt: Prompt, response_text: str) -> SpanFeedback:
        critique, good, poor = judge(response_text)
        return make_feedback(critique, good, poor, response_text, source="program", version="fake")

    bench.feedback.judge = judge_text  # type: ignore[method-assign]
    bench.run()
    assert bench.alarms(SAME_ALARM) == steps
    shares = [step.get("feedback/same_share") for step in bench.metrics()[1:]]
    assert (shares == [1.0] * 5) == bool(steps)
    assert (shares == [None] * 5) == (prompts_per_step == 1)


def test_a_judge_is_heard_again_after_it_has_read_a_step() -> None:
    history: list[dict[str, float]] = []
    raised = []
    for share in (1.0, 1.0, 1.0, 1.0, 0.4, 1.0, 1.0, 1.0):
        history.append({"feedback/same_share": share})
        raised.append(len(find_alarms(history, AlarmConfig())))
    assert raised == [0, 0, 1, 0, 0, 0, 0, 1]
