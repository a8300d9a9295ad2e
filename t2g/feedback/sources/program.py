"""Feedback from a task's own function or from a user's function, which is untrusted."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from t2g.errors import UserError
from t2g.feedback.parse import check_critique, make_failed_feedback, make_feedback, read_judgement
from t2g.feedback.sources.aligning import find_spans
from t2g.feedback.sources.user_function import FunctionFailed, UserFunction, load_function, shorten
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.base import FeedbackFunction
from t2g.types import Prompt, SpanFeedback

OPTIONS = ("payload", "messages", "data_file")  # keyword arguments that a function may have


class ProgramFeedback(FeedbackSource):
    """The judgements of a feedback function.

    The function maps prompt text and response to a judgement, see `t2g.feedback.parse.read_judgement`, or to a critique
    alone, a text, of which the aligner finds the spans. An exception is failed feedback with a reason.
    """

    name = "program"

    def __init__(
        self,
        function: FeedbackFunction | str,
        *,
        timeout_s: float = 120,
        concurrency: int = 1,
        retries: int = 0,
        log: Path | None = None,
        aligner: Aligner | None = None,
        section: str = "feedback",
        field: Literal["source", "align"] = "source",
    ) -> None:
        """Load the function.

        Args:
            function: The function or its import path. It is called as `function(prompt_text, response_text)`, with
                those of OPTIONS that it has as parameters.
            aligner: Finds the spans of a text alone; without it such an answer ends the run.
            section, field: Section and key of the config that name the function; with align it may have a parameter
                `critique`, too.
            timeout_s, concurrency, retries, log: See `UserFunction`.

        Raises:
            UserError: As `load_function`.
        """
        import_path = function if isinstance(function, str) else ""  # "": the task's own program
        key = f"{section}.{field}={import_path or 'program'}"
        if isinstance(function, str):
            options = (*OPTIONS, "critique") if field == "align" else OPTIONS
            form = f"(prompt_text, response_text) and perhaps {'= or '.join(options)}="
            function = load_function(function, key, form, num_arguments=2, options=options)
        self._path = import_path or _find_import_path(function)
        self.judgement_cache_key = import_path or (aligner.judgement_cache_key if aligner else "")
        self._key = key
        self._advice = ""
        if field == "source":
            self._advice = f"{section}.align=llm or reward_model finds its spans, or "
        self._aligner = aligner
        self.fleet = aligner.fleet if aligner else None
        self._function = UserFunction(
            function,
            kind="feedback function",
            key=key,
            timeout_s=timeout_s,
            concurrency=concurrency,
            retries=retries,
            log=log,
            section=section,
        )

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """Return the pieces that the function names, as spans of this critique, which replaces the function's own.

        Raises:
            UserError, RunStopped: As `judge`.
        """
        judgement = await self.judge(prompt, response_text, critique=critique)
        if not judgement.usable or judgement.critique == critique:
            return judgement
        own_spans = [replace(span, critique_range=None) for span in judgement.spans]
        good = [span for span in own_spans if span.label == 1]
        poor = [span for span in own_spans if span.label == -1]
        aligned = make_feedback(critique, good, poor, response_text, source=self.name, version=self._path)
        return replace(judgement, critique=critique, spans=aligned.spans)

    async def judge(self, prompt: Prompt, response_text: str, **options: Any) -> SpanFeedback:
        """Return the feedback on one response.

        Args:
            options: Further keyword arguments, which the function gets if it takes them.

        Raises:
            UserError: The function returned a text alone, and there is no aligner.
            RunStopped: As `UserFunction.call`.
        """
        messages = prompt.chat
        options["payload"] = prompt.payload
        options["messages"] = [dict(message) for message in messages]
        options["data_file"] = prompt.data_file
        read = partial(self._read, response_text=response_text)
        arguments = (prompt.prompt_text, response_text)
        try:
            feedback = await self._function.call(read, prompt.prompt_id, *arguments, **options)
        except FunctionFailed as failed:
            return make_failed_feedback("failed", source=self.name, version=self._path, reason=str(failed))
        if not isinstance(feedback, str):
            return feedback

        if self._aligner is None:
            raise UserError(
                f"{self._key}: the feedback function returned a critique alone, on prompt {prompt.prompt_id}: "
                f"{self._advice}return (critique, good pieces, poor pieces)"
            )
        unaligned = make_feedback(feedback, (), (), response_text, source=self.name, version=self._path)
        if not unaligned.critique.strip():
            return unaligned
        return await find_spans(self._aligner, prompt, response_text, unaligned)

    def _read(self, answer: Any, response_text: str) -> SpanFeedback | str:
        """Return the feedback, or a critique alone, whose spans the aligner finds. FunctionFailed for anything else."""
        try:
            if isinstance(answer, str):
                return check_critique(answer)
            return read_judgement(answer, response_text, source=self.name, version=self._path)
        except ValueError as error:
            raise FunctionFailed(f"returned an invalid judgement: {shorten(str(error))}") from None


def _find_import_path(function: FeedbackFunction) -> str:
    """Return where a function comes from; for a closure the function that made it."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", "?")
    outer_name = name.partition(".<locals>")[0]
    return f"{module}:{outer_name}"
