"""jobs.evaluate --what teacher: scores and log-ratios of teacher and control on the same prompts, and the advice."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import LetterTask, letter_prompts, letter_tokenizer
from trainer_bench import job

from jobs.train_policy.policy_job import try_teacher
from jobs.train_policy.teacher_evaluation import (
    advise,
    evaluate_teacher,
    format_result,
    summarize_gaps,
    summarize_scores,
)
from t2g.config import PolicyJob
from t2g.errors import RunStopped
from t2g.feedback.parse import make_feedback
from t2g.interfaces import FeedbackSource, Sampling
from t2g.types import Prompt, Rollout, SpanFeedback

GAPS = {"a": 0.5, "b": -1.0, "c": 7.0}  # with a critique of the same prompt, by letter


class Policy:
    """Writes `aabbc` without a critique, and else the letter that its critique names.

    A critique makes letters likelier by GAPS, times 1 if it is of this prompt and -0.25 if it is not.
    """

    is_ready = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.sampled = list[str]()
        self.scored = list[str]()

    async def sample(self, prompt: Prompt, sampling: Sampling, on_rollout: Any = None) -> list[Rollout]:
        text = self.tokenizer.decode(prompt.prompt_ids)
        self.sampled.append(text)
        answer = text.rpartition("write ")[2][:1] if "write " in text else "aabbc"
        ids = np.array(self.tokenizer(answer).input_ids, np.int32)
        return [
            Rollout(
                prompt_id=prompt.prompt_id, sample_index=0, prompt_ids=prompt.prompt_ids, response_text=answer,
                response_ids=ids, rollout_logprobs=np.zeros(len(ids), np.float32), finish_reason="stop",
                policy_versions=(),
            )
        ]  # fmt: skip

    async def compute_logprobs(self, prompt: Prompt, response_ids: np.ndarray) -> np.ndarray:
        critique = self.tokenizer.decode(prompt.prompt_ids)
        number = prompt.prompt_id.removeprefix("p").removesuffix("/teacher")
        factor = 0.0 if "write " not in critique else 1.0 if f"of {number} " in critique else -0.25
        self.scored.append(critique)
        letters = [self.tokenizer.decode([i]) for i in response_ids[:-1]]
        return np.array([factor * GAPS.get(letter, 0.0) - 2 for letter in letters], np.float32)


class Advice(FeedbackSource):
    """A source whose critique names the letter of its prompt; prompts from p7 on get no critique."""

    name = "program"

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        number = int(prompt.prompt_id[1:])
        critique = f"of {number} write {'ab'[number % 2]}" if number < 7 else ""
        return make_feedback(critique, ["aa"], ["bb"], response_text, source="program", version="1")


class Measured(LetterTask):
    """The score of a response is whether it is the letter of its prompt."""

    def teacher_messages(self, prompt: Prompt, critique: str) -> Any:
        return [{"role": "user", "content": critique}]

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: Any) -> dict[str, float]:
        return {self.score_name: float(response_text == "ab"[int(prompt.prompt_id[1:]) % 2])}


def evaluate(
    folder: Path, count: int, *, policy: type[Policy] = Policy, source: Any = None, first: int = 0, **run: Any
) -> tuple[dict[str, Any], Policy]:
    """Return the result of a task that measures each prompt, and the policy that was called."""
    tokenizer = letter_tokenizer(folder)
    prompts = [replace(p, prompt_id=f"p{i + first}") for i, p in enumerate(letter_prompts(count))]
    data = SimpleNamespace(task=Measured(), tokenizer=tokenizer, prompts=[], eval_prompts=prompts)
    config = PolicyJob.model_validate(job().model_dump() | {"run": run})
    rollouts = policy(tokenizer)
    return evaluate_teacher(config, data, rollouts, source or Advice()), rollouts  # type: ignore[arg-type]


def test_the_same_prompts_are_scored_without_a_critique_with_their_own_and_with_anothers(tmp_path: Path) -> None:
    result, policy = evaluate(tmp_path, 8)
    assert result["prompts"] == 7, "p7 has no critique of its own"
    assert (result["policy"], result["teacher"]) == (0.0, 1.0)
    assert result["shuffled"] == pytest.approx(1 / 7), "p6 reads the critique of p0, which names the same letter"
    assert (len(policy.sampled), len(policy.scored)) == (8 + 7 + 7, 3 * 7)
    assert "control" not in format_result(result) and "+1.000 [+1.000, +1.000]" in format_result(result)


def test_the_gaps_are_log_ratios_of_the_policys_own_tokens(tmp_path: Path) -> None:
    result, _ = evaluate(tmp_path, 7)
    gaps = result["gaps"]["teacher"]
    control = result["gaps"]["shuffled"]
    assert {kind: of["value"] for kind, of in gaps.items()} == {"good": 0.5, "poor": -1.0, "poor_first": -1.0}
    assert {kind: of["value"] for kind, of in control.items()} == {"good": -0.125, "poor": 0.25, "poor_first": 0.25}
    assert "can help" in result["advice"]


def test_gaps_are_means_over_tokens_with_an_interval_over_responses() -> None:
    """Mean of 30 ones and 10 minus ones; each response has tokens of one value, so that the interval is wide."""
    responses = [{"good": np.full(3, 1.0), "poor": np.zeros(0)}] * 10 + [
        {"good": np.full(1, -1.0), "poor": np.zeros(0)}
    ] * 10
    gaps = summarize_gaps(responses)
    assert [*gaps] == ["good"], "no token is poor"
    assert gaps["good"]["value"] == pytest.approx(0.5)
    assert gaps["good"]["low"] < 0.3
    assert 0.7 < gaps["good"]["high"] < 1


def test_a_smoke_run_measures_as_many_prompts_as_a_step_has_responses(tmp_path: Path) -> None:
    result, policy = evaluate(tmp_path, 40, smoke=True)
    assert len(policy.sampled) == 32 + 7 + 7
    assert result["prompts"] == 7


def test_a_comparison_needs_two_prompts_with_critiques(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="0 of 3 prompts have two critiques"):
        evaluate(tmp_path, 3, first=7)


def test_only_a_smoke_run_with_a_teacher_measures_it_and_goes_on_without_critiques(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    data = SimpleNamespace(task=Measured(), tokenizer=tokenizer, prompts=[], eval_prompts=letter_prompts(9))
    lines = {}
    for smoke, teacher, count in ((True, {}, 9), (True, {}, 1), (True, None, 9), (False, {}, 9)):
        data.eval_prompts = letter_prompts(count)
        config = PolicyJob.model_validate(job(teacher=teacher).model_dump() | {"run": {"smoke": smoke}})
        lines[smoke, teacher is not None, count] = try_teacher(config, data, Policy(tokenizer), Advice())
    assert lines[True, False, 9] == lines[False, True, 9] == []
    assert "teacher_less_policy    +1.000" in lines[True, True, 9][0]
    assert "teacher, poor_first    -1.000" in lines[True, True, 9][0]
    assert "not measured: 0 of 1 prompts" in lines[True, True, 1][0], "a single prompt has no control"


def test_a_task_without_a_measure_has_the_gaps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "score_name", None)
    result, policy = evaluate(tmp_path, 7)
    assert result.keys() == {"prompts", "gaps", "advice"} and "can help" in result["advice"]
    assert len(policy.sampled) == 7 and "poor_first" in format_result(result)


def test_the_teacher_of_a_thinking_model_reads_critiques_of_answers(tmp_path: Path) -> None:
    judged = list[str]()

    class Thinking(Policy):
        """Thinks `c` before each answer, and gives none to p5."""

        async def sample(self, prompt: Prompt, sampling: Sampling, on_rollout: Any = None) -> list[Rollout]:
            (rollout,) = await super().sample(prompt, sampling)
            start = None if prompt.prompt_id == "p5" else 1
            ids = np.append(self.tokenizer("c").input_ids, rollout.response_ids).astype(np.int32)
            return [replace(rollout, response_text=f"c{rollout.response_text}", answer_start=start, response_ids=ids)]

    class Reader(Advice):
        async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
            judged.append(response_text)
            return await super().judge(prompt, response_text)

    result, _ = evaluate(tmp_path, 6, policy=Thinking, source=Reader())
    assert judged == ["aabbc"] * 5
    assert (result["prompts"], result["policy"], result["teacher"], result["shuffled"]) == (5, 0.0, 1.0, 0.2)
    assert result["gaps"]["teacher"]["good"]["value"] == 0.5, "c, the thinking, is no good token"


@pytest.mark.parametrize(
    ("teacher", "control", "gaps", "advice"),
    [
        (0.9, 0.5, {"good": 0.1, "poor_first": -0.5}, "can help"),
        (0.9, 0.5, {}, "can help"),
        (0.9, 0.95, {"good": 0.1, "poor_first": -0.5}, "another prompt's critique helps as much"),
        (
            0.9,
            0.9,
            {"good": 0.1, "poor_first": -0.5},
            "200 prompts do not tell whether the teacher is better than the control",
        ),
        (0.5, 0.3, {"good": 0.1, "poor_first": -0.5}, "200 prompts do not tell whether the teacher is better than the"),
        (0.5, 0.3, {"good": 0.1, "poor_first": 0.2}, "will not help: it makes poor tokens likelier"),
        (0.4, 0.3, {"good": 0.1, "poor_first": -0.5}, "will not help: it is not better than the policy;"),
        (0.9, 0.5, {"good": 0.1, "poor_first": 0.2}, "will not help: it makes poor tokens likelier"),
        (0.9, 0.5, {"good": -1.2, "poor_first": -0.1}, "(-1.10 nats)"),
        (0.4, 0.3, {"good": -0.2, "poor_first": 0.9}, "not better than the policy, and it makes poor tokens likelier"),
    ],
)
def test_the_advice_follows_the_intervals_and_the_contrast(
    teacher: float, control: float, gaps: dict[str, float], advice: str
) -> None:
    noise = np.random.default_rng(1).normal(0, 0.05, (3, 200))
    result = summarize_scores(0.5 + noise[0], teacher + noise[1], control + noise[2], name="f1")
    means = {kind: {"value": gap} for kind, gap in gaps.items()}
    assert advice in advise(result | {"prompts": 200, "gaps": {"teacher": means}})
    assert result["teacher_less_policy"]["value"] == pytest.approx(teacher - 0.5, abs=0.02)
    assert result["teacher_less_policy"]["low"] < result["teacher_less_policy"]["value"]
    assert result["measure"] == "f1"


def test_without_a_measure_and_poor_spans_the_advice_says_that_nothing_is_known() -> None:
    assert "nothing tells" in advise({"gaps": {"teacher": {"good": {"value": 0.5}}}})
    assert "will not help" in advise({"gaps": {"teacher": {"poor_first": {"value": 0.5}}}})
