"""jobs.evaluate --what teacher: scores of policy, teacher and control on the same prompts, and the advice."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import LetterTask, letter_prompts, letter_tokenizer
from trainer_bench import job

from jobs.common.teacher_evaluation import score_responses, summarize_scores
from t2g.errors import RunStopped
from t2g.feedback.parse import make_feedback
from t2g.interfaces import Sampling
from t2g.types import Prompt, Rollout, SpanFeedback


class Policy:
    """A policy that writes the letter named last in its prompt, and z without one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.prompts = tokenizer, list[str]()

    async def sample(self, prompt: Prompt, sampling: Sampling, on_rollout: Any = None) -> list[Rollout]:
        text = self.tokenizer.decode(prompt.prompt_ids)
        self.prompts.append(text)
        answer = text.rpartition("write ")[2][:1] if "write " in text else "z"
        empty = np.zeros(0, np.float32)
        return [
            Rollout(
                prompt_id=prompt.prompt_id, sample_index=0, prompt_ids=prompt.prompt_ids, response_text=answer,
                response_ids=empty.astype(np.int32), rollout_logprobs=empty, finish_reason="stop", policy_versions=(),
            )
        ]  # fmt: skip


class Advice:
    """A source whose critique names the letter of its prompt; one prompt gets no critique."""

    name = "program"

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        number = int(prompt.prompt_id[1:])
        critique = f"write {'ab'[number % 2]}" if number < 7 else ""
        return make_feedback(critique, (), (), response_text, source="program", version="1")


class Measured(LetterTask):
    """The score of a response is whether it is the letter of its prompt."""

    def teacher_messages(self, prompt: Prompt, critique: str, input_limit: int | None = None) -> Any:
        return [{"role": "user", "content": critique}]

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: Any) -> dict[str, float]:
        return {self.score_name: float(response_text == "ab"[int(prompt.prompt_id[1:]) % 2])}


def test_the_same_prompts_are_scored_without_a_critique_with_their_own_and_with_anothers(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    prompts = [replace(p, prompt_id=f"p{i}") for i, p in enumerate(letter_prompts(8))]
    data = SimpleNamespace(task=Measured(), tokenizer=tokenizer, prompts=prompts, eval_prompts=prompts)
    config, policy = job(), Policy(tokenizer)
    plain, teacher, control = asyncio.run(score_responses(config, data, prompts, policy, Advice()))  # type: ignore[arg-type]
    assert teacher.tolist() == [1.0] * 7, "p7 has no critique of its own"
    assert plain.tolist() == [0.0] * 7
    assert control.tolist() == [0.0] * 6 + [1.0], "p6 reads the critique of p0, which names the same letter"
    assert len(policy.prompts) == 8 + 7 + 8


def test_a_comparison_needs_two_prompts_with_critiques(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    prompts = [replace(p, prompt_id=f"p{i + 7}") for i, p in enumerate(letter_prompts(3))]
    data = SimpleNamespace(task=Measured(), tokenizer=tokenizer, prompts=prompts, eval_prompts=prompts)
    with pytest.raises(RunStopped, match="0 of 3 prompts have two critiques"):
        asyncio.run(score_responses(job(), data, prompts, Policy(tokenizer), Advice()))  # type: ignore[arg-type]


def test_the_teacher_of_a_thinking_model_reads_critiques_of_answers(tmp_path: Path) -> None:
    tokenizer, judged = letter_tokenizer(tmp_path), list[str]()
    prompts = [replace(p, prompt_id=f"p{i}") for i, p in enumerate(letter_prompts(6))]
    data = SimpleNamespace(task=Measured(), tokenizer=tokenizer, prompts=prompts, eval_prompts=prompts)

    class Thinking(Policy):
        """Thinks `c` before each answer, and gives none to p5."""

        async def sample(self, prompt: Prompt, sampling: Sampling, on_rollout: Any = None) -> list[Rollout]:
            (rollout,) = await super().sample(prompt, sampling)
            start = None if prompt.prompt_id == "p5" else 1
            return [replace(rollout, response_text=f"c{rollout.response_text}", answer_start=start)]

    class Reader(Advice):
        async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
            judged.append(response_text)
            return await super().judge(prompt, response_text)

    scores = asyncio.run(score_responses(job(), data, prompts, Thinking(tokenizer), Reader()))  # type: ignore[arg-type]
    assert judged == ["z"] * 5
    assert [row.tolist() for row in scores] == [[0.0] * 5, [1.0] * 5, [0.0] * 4 + [1.0]], "p4 reads that of p0"


@pytest.mark.parametrize(
    ("teacher", "control", "advice"),
    [(0.9, 0.5, "can help"), (0.9, 0.9, "another prompt's critique helps as much"), (0.5, 0.3, "will not help")],
)
def test_the_advice_follows_the_intervals(teacher: float, control: float, advice: str) -> None:
    noise = np.random.default_rng(1).normal(0, 0.05, (3, 200))
    result = summarize_scores(0.5 + noise[0], teacher + noise[1], control + noise[2], name="f1")
    assert advice in result["advice"]
    assert result["teacher_less_policy"]["value"] == pytest.approx(teacher - 0.5, abs=0.02)
    assert result["teacher_less_policy"]["low"] < result["teacher_less_policy"]["value"]
    assert (result["prompts"], result["measure"]) == (200, "f1")
