"""The tiny worlds as tasks: SLF5K and KodCode records, instructions that a model of a million parameters can learn."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from t2g.config import StyleConfig
from t2g.sandbox import Outcome, SandboxConfig
from t2g.tasks.base import SPARSE, FeedbackFunction, Record, text_field
from t2g.tasks.code import CodeTask
from t2g.tasks.summarization import SummarizationTask
from t2g.tasks.tiny import world
from t2g.tasks.tiny.interpreter import interpret
from t2g.text.tokenizer import Message
from t2g.types import Prompt


class TinyTask(SummarizationTask):
    name = "tiny"
    score_name = "fact_f1"
    instruction = world.POLICY_INSTRUCTION
    step_pattern = r"[,.]"  # clauses: a summary is one sentence

    def prompt_text(self, record: Record) -> str:
        """The post alone: the title states facts as well, without the faults that make the task one."""
        return text_field(record, "post")

    def reference(self, record: Record) -> str | None:
        """The summary with planted faults: what the base policy learns."""
        return text_field(record, "tldr_human_reference_summary")

    def feedback_messages(
        self, prompt: Prompt, response_text: str, input_limit: int | None = None, *, style: StyleConfig = SPARSE
    ) -> list[Message]:
        instruction = world.FEEDBACK_INSTRUCTIONS[style.critique, style.labels]
        asked = f"{instruction}{prompt.prompt_text[:input_limit]}{world.FEEDBACK_SUMMARY_HEADER}"
        return [{"role": "user", "content": asked + response_text}]

    def make_feedback_function(self, *, style: StyleConfig, sandbox: SandboxConfig) -> FeedbackFunction:
        """Reads the payload's facts; nothing runs that would need a sandbox."""
        return partial(feedback_function, dense=style.labels == "dense")

    def revise_messages(
        self, prompt: Prompt, response_text: str, critique: str, input_limit: int | None = None
    ) -> list[Message]:
        asked = f"Mend the summary. Post: {prompt.prompt_text[:input_limit]}"
        return [{"role": "user", "content": f"{asked}\nSummary: {response_text}\nCritique: {critique}"}]

    def faults(self, prompt: Prompt, response_text: str) -> list[tuple[str, int, int]]:
        found = world.findings(prompt.payload["facts"], response_text) if "facts" in prompt.payload else ()
        return [(one.verdict, one.clause.start, one.clause.end) for one in found if one.verdict != "right"]

    def plant_faults(self, prompt: Prompt, rng: np.random.Generator) -> str | None:
        facts = prompt.payload.get("facts")
        return world.write_summary(facts, world.PLANTED, rng) if facts else None

    def can_measure(self, prompt: Prompt) -> bool:
        return bool(prompt.payload.get("facts"))

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        return world.measure(prompt.payload["facts"], response_text) if self.can_measure(prompt) else None


def feedback_function(
    prompt_text: str, response_text: str, *, payload: Mapping[str, Any], dense: bool = False
) -> world.Judgement:
    """The tiny world's feedback function (`world.judge_summary`), which needs the facts in the payload."""
    return world.judge_summary(payload["facts"], response_text, dense=dense)


class TinyCodeTask(CodeTask):
    """Truth by execution: feedback function and critique are those of the task code."""

    name = "tiny_code"
    instruction = "Write f. "

    def prompt_text(self, record: Record) -> str:
        return text_field(record, "question")

    def reference(self, record: Record) -> str | None:
        """The program with planted faults: what the base policy learns."""
        return text_field(record, "solution")

    def reference_mode(self, prompt: Prompt, *, sandbox: SandboxConfig) -> str | None:
        """None: references have planted faults."""
        return None

    def run(self, code: str, tests: str, sandbox: SandboxConfig) -> Outcome:
        return interpret(code, tests) or super().run(code, tests, sandbox)

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """passed: all tests, hidden ones too where there are any; shown_only: none but those that feedback sees."""
        shown, hidden = super().measure(prompt, response_text, sandbox=sandbox), prompt.payload.get("hidden_test")
        if shown is None or hidden is None:
            return shown
        passed = shown["passed"] and self.passed(prompt, response_text, hidden, sandbox)
        return {"passed": passed, "shown_only": shown["passed"] - passed}
