"""Feedback by the message that follows a response in a conversation, see `t2g.feedback.conversations`."""

from dataclasses import replace

from t2g.feedback.conversations import NEXT_MESSAGE
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.feedback.sources.aligning import find_spans
from t2g.feedback.sources.program import ProgramFeedback
from t2g.feedback.tool_spans import find_tool_spans, load_results
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.prompts_only import format_chat
from t2g.types import Prompt, SpanFeedback


class NextMessageFeedback(FeedbackSource):
    """The critique is the field NEXT_MESSAGE of the prompt's payload.

    Errors of tools have their spans, see `t2g.feedback.tool_spans`. An aligner finds those of a critique without such
    errors; none: no spans.
    """

    name = NEXT_MESSAGE
    judges_turns = True

    def __init__(self, aligner: Aligner | None = None) -> None:
        self._aligner = aligner
        if aligner is not None:
            self.fleet = aligner.fleet
            self.judgement_cache_key = aligner.judgement_cache_key

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        critique = prompt.payload.get(NEXT_MESSAGE)
        if not isinstance(critique, str) or not critique.strip():
            reason = f"no message follows the response to prompt {prompt.prompt_id}"
            return make_failed_feedback("failed", source=self.name, version="", reason=reason)
        poor = find_tool_spans(load_results(prompt.payload), response_text, critique)
        feedback = make_feedback(critique, (), poor, response_text, source=self.name, version="")
        if poor or self._aligner is None:
            return feedback
        if prompt.messages and not isinstance(self._aligner, ProgramFeedback):
            # A program reads the question, a model the chat so far, as it is in the records of logged conversations.
            prompt = replace(prompt, prompt_text=format_chat(prompt.messages))
        return await find_spans(self._aligner, prompt, response_text, feedback)
