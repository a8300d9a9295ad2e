"""Feedback that a person wrote down before: a file, looked up by prompt and response."""

import hashlib
from pathlib import Path
from typing import Any

from t2g.data.load import read_lines
from t2g.errors import UserError
from t2g.feedback.parse import make_feedback, no_feedback, read_judgement
from t2g.feedback.waiting import FailureLog
from t2g.types import Prompt, SpanFeedback

Key = tuple[str | None, str | None, str]  # prompt_id and prompt as far as the line gives them, response


class HumanFeedback:
    """Judgements written down before: JSON lines with response, critique, good, poor, and prompt_id or prompt or both.

    A line with both holds for a prompt that has both; then a line with the prompt's text counts before one with its id,
    since another data set may have the same ids. A response that nobody judged has failed feedback.
    """

    name = "human"

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"feedback.human_file={path}: there is no such file")
        self._path = path
        self._version = f"{path.name}@{hashlib.blake2b(path.read_bytes(), digest_size=4).hexdigest()}"
        self._failures = FailureLog()
        self._judgements: dict[Key, SpanFeedback] = {}
        for number, row in read_lines(path):
            try:
                key, feedback = self._read(row)
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from error
            if key in self._judgements:
                raise UserError(f"{path}:{number}: judges a response that a line before it judged already")
            self._judgements[key] = feedback
        if not self._judgements:
            raise UserError(f"feedback.human_file={path} holds no judgements")

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        asked = (prompt.prompt_id, prompt.prompt_text), (None, prompt.prompt_text), (prompt.prompt_id, None)
        for prompt_id, text in asked:
            feedback = self._judgements.get((prompt_id, text, response_text))
            if feedback is not None:
                return feedback
        self._failures.say("missing", f"{self._path} has no judgement of a response to prompt {prompt.prompt_id}")
        return no_feedback("failed", source=self.name, version=self._version)

    def _read(self, row: dict[str, Any]) -> tuple[Key, SpanFeedback]:
        prompt_id, text, response = (_text_or_none(row, field) for field in ("prompt_id", "prompt", "response"))
        if response is None or (prompt_id is None and text is None):
            raise ValueError("needs a response and a prompt_id or prompt")
        judgement = read_judgement((row.get("critique"), row.get("good", ()), row.get("poor", ())))
        feedback = make_feedback(*judgement, response, source=self.name, version=self._version)
        if feedback.num_located < feedback.num_quotes:
            lost = feedback.num_quotes - feedback.num_located
            raise ValueError(f"{lost} of its {feedback.num_quotes} quotes do not stand in the response")
        return (prompt_id, text, response), feedback


def _text_or_none(row: dict[str, Any], field: str) -> str | None:
    value = row.get(field)
    if not isinstance(value, str | None):
        raise ValueError(f"{field} is {value!r:.80}; it needs to be a text")
    return value
