"""The tasks of the tiny worlds: SLF5K and KodCode records, with instructions for models of a million parameters."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from t2g.config import StyleConfig
from t2g.sandbox import Outcome, SandboxConfig
from t2g.tasks.base import SPARSE, FeedbackFunction, Record, Review, Task, get_text
from t2g.tasks.code import CodeTask
from t2g.tasks.summarization import SummarizationTask
from t2g.tasks.tiny import programs, world
from t2g.tasks.tiny.interpreter import interpret
from t2g.text.tokenizer import Message
from t2g.types import Prompt


class TinyTask(SummarizationTask):
    name = "tiny"
    score_name = "fact_f1"
    instruction = world.POLICY_INSTRUCTION
    step_pattern = r"[,.]"  # clauses: a summary is one sentence

    def prompt_text(self, record: Record) -> str:
        """Return the post alone: the title also states facts."""
        return get_text(record, "post")

    def reference(self, record: Record) -> str | None:
        """Return the summary with planted faults, the base policy's target."""
        return get_text(record, "tldr_human_reference_summary")

    def feedback_messages(
        self, prompt: Prompt, response_text: str, input_limit: int | None = None, *, style: StyleConfig = SPARSE
    ) -> list[Message]:
        instruction = world.FEEDBACK_INSTRUCTIONS[style.critique, style.labels]
        request = f"{instruction}{prompt.prompt_text[:input_limit]}{world.FEEDBACK_SUMMARY_HEADER}"
        return [{"role": "user", "content": request + response_text}]

    def make_feedback_function(self, *, style: StyleConfig, sandbox: SandboxConfig) -> FeedbackFunction:
        """Return `feedback_function`, which reads the payload's facts and needs no sandbox."""
        return partial(feedback_function, dense=style.labels == "dense")

    def revise_messages(
        self, prompt: Prompt, response_text: str, critique: str, input_limit: int | None = None
    ) -> list[Message]:
        request = f"Mend the summary. Post: {prompt.prompt_text[:input_limit]}"
        return [{"role": "user", "content": f"{request}\nSummary: {response_text}\nCritique: {critique}"}]

    def teacher_messages(self, prompt: Prompt, critique: str) -> list[Message]:
        return [{"role": "user", "content": f"{self.instruction}{prompt.prompt_text}\nCritique: {critique}"}]

    def faults(self, prompt: Prompt, response_text: str) -> list[tuple[str, int, int]]:
        if "facts" not in prompt.payload:
            return []
        findings = world.judge_clauses(prompt.payload["facts"], response_text)
        return [(verdict, clause.start, clause.end) for clause, verdict, _ in findings if verdict != "right"]

    def plant_faults(self, prompt: Prompt, rng: np.random.Generator) -> str | None:
        facts = prompt.payload.get("facts")
        return world.make_summary(facts, world.PLANTED, rng) if facts else None

    def can_measure(self, prompt: Prompt) -> bool:
        return bool(prompt.payload.get("facts"))

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        return world.measure(prompt.payload["facts"], response_text) if self.can_measure(prompt) else None


def feedback_function(
    prompt_text: str, response_text: str, *, payload: Mapping[str, Any], dense: bool = False
) -> world.SummaryJudgement:
    """Return `world.judge_summary` for the payload's facts."""
    return world.judge_summary(payload["facts"], response_text, dense=dense)


class TinyCodeTask(CodeTask):
    """Verbal rules and programs. Feedback and critique are those of the task code, with fixes from the rules."""

    name = "tiny_code"
    instruction = "Write f. "

    def prompt_text(self, record: Record) -> str:
        return get_text(record, "question")

    teacher_messages = TinyTask.teacher_messages  # a critique of tests is long, and the model has 512 positions

    def reference(self, record: Record) -> str | None:
        """Return the program with planted faults, the base policy's target."""
        return get_text(record, "solution")

    def reference_mode(self, prompt: Prompt, *, sandbox: SandboxConfig) -> str | None:
        """Return None: references have planted faults."""
        return None

    def make_feedback_function(self, *, style: StyleConfig, sandbox: SandboxConfig) -> FeedbackFunction:
        """Return the function of the task code; the poor lines of a rule's branch have a fix."""
        judge = super().make_feedback_function(style=style, sandbox=sandbox)

        def feedback_function(prompt_text: str, response_text: str, *, payload: Mapping[str, Any]) -> dict[str, Any]:
            answer = judge(prompt_text, response_text, payload=payload)
            poor = []
            for span in answer["poor"]:
                fix = programs.find_correction(prompt_text, response_text, span)
                poor.append(replace(span, fix=fix))
            return answer | {"poor": poor}

        return feedback_function

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        """Return the question, and for an example of a repair the conversation after it."""
        return [*super().policy_messages(record), *record.get("messages", ())]

    def describe_failures(self, outcome: Outcome, code: str, sandbox: SandboxConfig) -> str:
        return programs.describe_failures(outcome)

    def run(self, code: str, tests: str, sandbox: SandboxConfig) -> Outcome:
        return interpret(code, tests) or super().run(code, tests, sandbox)

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Return passed, of all tests with the hidden ones, and shown_only: only the tests that feedback sees pass."""
        visible = super().measure(prompt, response_text, sandbox=sandbox)
        hidden = prompt.payload.get("hidden_test")
        if visible is None or hidden is None:
            return visible
        passed = visible["passed"] and self.passed(prompt, response_text, hidden, sandbox)
        return {"passed": passed, "shown_only": visible["passed"] - passed}


class TinyToolsTask(Task):
    """Questions about a table, which the tools of the environment tiny_tools read."""

    name = "tiny_tools"
    score_name = "answered"
    input_fields = ("question",)
    review = Review(
        opening="You review an answer to a question about a table.",
        input_name="Question",
        subject="answer",
        sparse="the number, if it is right or wrong",
        questions="Is the number right?",
    )

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        """Return the question, and for an example of a later turn the conversation after it."""
        return [{"role": "user", "content": self.prompt_text(record)}, *record.get("messages", ())]

    def prompt_text(self, record: Record) -> str:
        return get_text(record, "question")

    def reference(self, record: Record) -> str | None:
        """Return the turn that the base policy learns, with planted faults."""
        return get_text(record, "turn")

    def can_measure(self, prompt: Prompt) -> bool:
        return isinstance(prompt.payload.get("answer"), str)

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Return answered: 1 if the response is the number, else 0."""
        if not self.can_measure(prompt):
            return None
        return {self.score_name: float(response_text.strip() == prompt.payload["answer"])}
