"""Feedback from a language model: requests, follow-ups about faults, and the vote of several annotators.

Other modules have the transport (t2g.feedback.sources.endpoint, actors.engines.chat), the answer format
(t2g.feedback.sources.annotator) and the vote (t2g.feedback.sources.votes).
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from t2g.config import SourceConfig
from t2g.errors import UserError
from t2g.feedback.parse import make_failed_feedback
from t2g.feedback.sources.aligning import find_spans
from t2g.feedback.sources.annotator import (
    AnnotationRequest,
    ParsedAnswer,
    build_answer_schema,
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
    estimate_prompt_tokens,
)
from t2g.feedback.sources.votes import vote
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.base import Task
from t2g.types import Prompt, SpanFeedback


def estimate_cost(items: Iterable[tuple[Prompt, str]], config: SourceConfig, task: Task) -> str:
    """Return an estimate of the tokens of these judgements as a sentence.

    It counts UTF-8 bytes / 3 for each prompt, `llm.max_output_tokens` for each answer, and no follow-ups.

    Raises:
        UserError: The estimate exceeds `llm.max_total_tokens`.
    """
    llm = config.llm
    requests = (make_request(task, prompt, response_text, config.style) for prompt, response_text in items)
    sizes = [estimate_prompt_tokens(request.messages, build_answer_schema(request)) for request in requests]
    num_requests, prompts = llm.num_annotators * len(sizes), llm.num_annotators * sum(sizes)
    answers = num_requests * llm.max_output_tokens
    estimate = (
        f"{llm.model}: {num_requests:,} requests, up to about {prompts + answers:,} tokens ({prompts:,} of prompts, "
        f"{answers:,} of answers), without second tries"
    )
    if llm.max_total_tokens is not None and prompts + answers > llm.max_total_tokens:
        raise UserError(
            f"{estimate}, more than llm.max_total_tokens={llm.max_total_tokens}; raise it, or judge fewer records "
            "(data.limit) under another run.name"
        )
    return estimate


class LLMFeedback(FeedbackSource):
    """A feedback source and aligner: it also finds the spans of a critique by another author."""

    name = "llm"

    def __init__(self, chat: Chat, config: SourceConfig, task: Task, aligner: Aligner | None = None) -> None:
        """`aligner` finds the spans of critiques with style.spans=false; none: this model finds them."""
        self.client = ChatClient(chat, config.llm, config.timeout_s)
        self._config, self._llm, self._task = config, config.llm, task
        votes = f"x{self._llm.num_annotators}" if self._llm.num_annotators > 1 else ""
        self.version = f"{chat.model}{votes}#{self._prompt_version()}"
        self.journal_version = self.version
        # Bounds the judgements in progress, which a killed run loses; each has several sequential requests.
        self._semaphore = PerLoop(lambda: asyncio.Semaphore(self._llm.concurrency))
        self._aligner: Aligner = aligner or self
        self.fleet = chat.fleet or (aligner.fleet if aligner else None)

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Return critique and spans. Without an answer the status is failed, with an unusable one unparsable.

        Raises:
            UserError: The key or the model is wrong.
            RunStopped: MAX_LOST requests in a row got no answer.
        """
        own = await self._annotate(make_request(self._task, prompt, response_text, self._config.style))
        if self._config.style.spans or not own.usable:
            return own
        return await find_spans(self._aligner, prompt, response_text, own)

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """Return the spans of this critique. Otherwise as `judge`."""
        return await self._annotate(make_request(self._task, prompt, response_text, self._config.style, critique))

    def _prompt_version(self) -> str:
        """Return a hash of the instructions, a part of the source's version."""
        blank = Prompt(prompt_id="", prompt_text="{input}", task=self._task.name)
        messages = make_request(self._task, blank, "{response}", self._config.style).messages
        return hashlib.blake2b(json.dumps(messages).encode(), digest_size=4).hexdigest()

    async def _annotate(self, request: AnnotationRequest) -> SpanFeedback:
        num_annotators = self._llm.num_annotators if "spans" in request.keys else 1
        async with self._semaphore.get():
            answers = await asyncio.gather(*(self._ask_annotator(request, seed) for seed in range(num_annotators)))
        if num_annotators == 1:
            return answers[0]
        usable = [answer for answer in answers if answer.usable]
        if 2 * len(usable) > num_annotators:
            return vote(usable, num_annotators, request.response_text)
        unusable = next(answer for answer in answers if not answer.usable)
        reason = f"{len(usable)} of {num_annotators} annotators gave a usable answer; one did not: {unusable.reason}"
        return replace(unusable, critique="", reason=reason)

    async def _ask_annotator(self, request: AnnotationRequest, seed: int) -> SpanFeedback:
        """Return the feedback of one annotator, with follow-ups about the faults of an answer."""
        # For all attempts. Waiting for a slot does not count: a rate limit is no failure.
        left_s = self._config.timeout_s
        chat_request = ChatRequest(
            messages=request.messages,
            schema=build_answer_schema(request),
            max_output_tokens=self._llm.max_output_tokens,
            temperature=self._llm.temperature,
            seed=seed,
        )
        readings: list[ParsedAnswer] = []
        failure: ChatError | None = None  # of the last attempt
        for _ in range(self._llm.max_tries):
            async with self.client.slot():
                started = time.monotonic()
                try:
                    completion, failure = await self._complete(chat_request, left_s), None
                except ChatError as error:
                    failure = error
                left_s -= time.monotonic() - started
            if failure:
                if not failure.is_transient:
                    break
                continue
            readings.append(read_answer(completion, request, source=self.name, version=self.version))
            if not readings[-1].faults:
                break
            chat_request = replace(chat_request, messages=make_follow_up(request, completion.text, readings[-1].faults))
        if failure and not any(reading.feedback.spans for reading in readings):
            self.client.record_failure(failure)
            return make_failed_feedback("failed", source=self.name, version=self.version, reason=str(failure))
        return choose_feedback(readings)

    async def _complete(self, request: ChatRequest, limit_s: float) -> Completion:
        """Return the answer. A refusal is a ChatError that is not transient: the model would refuse again."""
        completion = await self.client.complete(request, limit_s)
        if completion.finish_reason == "refusal":
            raise ChatError("refusal", f"{self.client.chat.name} refused: {completion.text:.2000}")
        return completion


def choose_feedback(readings: Sequence[ParsedAnswer]) -> SpanFeedback:
    """Return the feedback of one annotator's answers (at least one), of which only the last may be without faults.

    Without such an answer it is the feedback with most located quotes, then fewest faults, then the latest; unparsable
    if it has no span.
    """
    if not readings[-1].faults:
        return readings[-1].feedback
    best = max(enumerate(readings), key=lambda item: (item[1].feedback.num_located, -len(item[1].faults), item[0]))[1]
    if best.feedback.spans:
        return best.feedback
    reason = f"{len(readings)} answers, none without faults: {' '.join(best.faults)}"
    return replace(best.feedback, status="unparsable", reason=reason)
