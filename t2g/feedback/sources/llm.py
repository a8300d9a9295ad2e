"""Feedback from a language model that annotates: asked, told what was wrong, asked again; several may vote.

Not here: how a model is reached (t2g.feedback.sources.endpoint, actors.engines.chat), what its answers look like
(t2g.feedback.sources.annotator), and how votes are counted (t2g.feedback.sources.votes).
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from t2g.config import FeedbackConfig
from t2g.errors import UserError
from t2g.feedback.parse import make_failed_feedback
from t2g.feedback.sources.annotator import (
    AnnotationRequest,
    ParsedAnswer,
    answer_schema,
    make_follow_up,
    make_request,
    read_answer,
)
from t2g.feedback.sources.chat_client import (
    Chat,
    ChatClient,
    ChatError,
    ChatRequest,
    Completion,
    PerLoop,
    prompt_tokens,
)
from t2g.feedback.sources.votes import vote
from t2g.interfaces import FeedbackSource
from t2g.tasks.base import Task
from t2g.types import Prompt, SpanFeedback


def estimate_cost(items: Iterable[tuple[Prompt, str]], config: FeedbackConfig, task: Task) -> str:
    """What these judgements may cost, in a sentence, before the first of them: UTF-8 bytes / 3 for each prompt,
    `llm.max_output_tokens` for each answer, no second tries. UserError when that is above `llm.max_total_tokens`.
    """
    llm = config.llm
    requests = (make_request(task, prompt, response_text, config.style) for prompt, response_text in items)
    sizes = [prompt_tokens(request.messages, answer_schema(request)) for request in requests]
    num_requests, prompts = llm.num_annotators * len(sizes), llm.num_annotators * sum(sizes)
    answers = num_requests * llm.max_output_tokens
    words = (
        f"{llm.model}: {num_requests:,} requests, up to about {prompts + answers:,} tokens ({prompts:,} of prompts, "
        f"{answers:,} of answers), without second tries"
    )
    if llm.max_total_tokens is not None and prompts + answers > llm.max_total_tokens:
        raise UserError(
            f"{words}, more than llm.max_total_tokens={llm.max_total_tokens}; raise it, or judge fewer records "
            "(data.limit) under another run.name"
        )
    return words


class LLMFeedback(FeedbackSource):
    """A feedback source, and an aligner: it also finds the spans of a critique that somebody else wrote."""

    name = "llm"

    def __init__(self, chat: Chat, config: FeedbackConfig, task: Task) -> None:
        self.asker = ChatClient(chat, config.llm, config.timeout_s)
        self._config, self._llm, self._task = config, config.llm, task
        votes = f"x{self._llm.num_annotators}" if self._llm.num_annotators > 1 else ""
        self.version = f"{chat.model}{votes}#{self._prompt_version()}"
        # Judgements under way, each with several requests one after the other: a run that is killed loses these.
        self._turn = PerLoop(lambda: asyncio.Semaphore(self._llm.concurrency))
        self.fleet = chat.fleet

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Critique and spans. What is no answer is failed feedback, an answer of no use is unparsable, with a reason.

        Raises UserError for a wrong key or model, RunStopped after MAX_LOST annotators in a row without an answer.
        """
        return await self._annotated(make_request(self._task, prompt, response_text, self._config.style))

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """The spans that this critique speaks of, else as `judge`."""
        return await self._annotated(make_request(self._task, prompt, response_text, self._config.style, critique))

    def _prompt_version(self) -> str:
        """Hash of all that every request says: other instructions are another version of the source."""
        blank = Prompt(prompt_id="", prompt_text="{input}", task=self._task.name)
        messages = make_request(self._task, blank, "{response}", self._config.style).messages
        return hashlib.blake2b(json.dumps(messages).encode(), digest_size=4).hexdigest()

    async def _annotated(self, request: AnnotationRequest) -> SpanFeedback:
        num_annotators = self._llm.num_annotators
        async with self._turn.get():
            answers = await asyncio.gather(*(self._annotator(request, seed) for seed in range(num_annotators)))
        if num_annotators == 1:
            return answers[0]
        usable = [answer for answer in answers if answer.usable]
        if 2 * len(usable) > num_annotators:
            return vote(usable, num_annotators, request.response_text)
        without = next(answer for answer in answers if not answer.usable)
        reason = f"{len(usable)} of {num_annotators} annotators gave a usable answer; one did not: {without.reason}"
        return replace(without, critique="", reason=reason)

    async def _annotator(self, request: AnnotationRequest, seed: int) -> SpanFeedback:
        """The feedback of one annotator, who is told what was wrong with an answer and asked again."""
        left_s = self._config.timeout_s  # for all tries; waiting for a turn does not count: a slow pace is no failure
        question = ChatRequest(
            messages=request.messages,
            schema=answer_schema(request),
            max_output_tokens=self._llm.max_output_tokens,
            temperature=self._llm.temperature,
            seed=seed,
        )
        readings: list[ParsedAnswer] = []
        failed: ChatError | None = None  # the last try
        for _ in range(self._llm.max_tries):
            async with self.asker.turn():
                started = time.monotonic()
                try:
                    completion, failed = await self._complete(question, left_s), None
                except ChatError as error:
                    failed = error
                left_s -= time.monotonic() - started
            if failed:
                if not failed.is_transient:
                    break
                continue
            readings.append(read_answer(completion, request, source=self.name, version=self.version))
            if not readings[-1].faults:
                break
            question = replace(question, messages=make_follow_up(request, completion.text, readings[-1].faults))
        if failed and not any(reading.feedback.spans for reading in readings):
            self.asker.failed(failed)
            return make_failed_feedback("failed", source=self.name, version=self.version, reason=str(failed))
        return choose_feedback(readings)

    async def _complete(self, question: ChatRequest, limit_s: float) -> Completion:
        """An answer. Raises ChatError for a refusal, too: asked again the model would refuse again."""
        completion = await self.asker.complete(question, limit_s)
        if completion.finish_reason == "refusal":
            raise ChatError("refusal", f"{self.asker.chat.name} refused: {completion.text:.2000}")
        return completion


def choose_feedback(readings: Sequence[ParsedAnswer]) -> SpanFeedback:
    """The feedback of one annotator's answers (at least one), of which only the last may be without faults.

    That one if it is; else the one with most quotes located, then fewest faults, then the later. Without a span it is
    unparsable.
    """
    if not readings[-1].faults:
        return readings[-1].feedback
    best = max(enumerate(readings), key=lambda item: (item[1].feedback.num_located, -len(item[1].faults), item[0]))[1]
    if best.feedback.spans:
        return best.feedback
    reason = f"{len(readings)} answers, none without faults: {' '.join(best.faults)}"
    return replace(best.feedback, status="unparsable", reason=reason)
