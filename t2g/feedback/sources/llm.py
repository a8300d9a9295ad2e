"""Feedback from a language model: requests, follow-ups about faults, and the vote of several annotators.

Other modules have the transport (t2g.feedback.sources.endpoint, actors.engines.chat), the answer format
(t2g.feedback.sources.annotator) and the vote (t2g.feedback.sources.votes).
"""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from t2g.concurrency import gather_all
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
    ChatCompletion,
    ChatError,
    ChatRequest,
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
    num_requests = 0
    prompt_tokens = 0
    for prompt, response_text in items:
        request = make_request(task, prompt, response_text, config.style)
        schema = build_answer_schema(request)
        num_requests += llm.num_annotators
        prompt_tokens += llm.num_annotators * estimate_prompt_tokens(request.messages, schema)
    answer_tokens = num_requests * llm.max_output_tokens
    total = prompt_tokens + answer_tokens
    estimate = (
        f"{llm.model}: {num_requests:,} requests, up to about {total:,} tokens ({prompt_tokens:,} of prompts, "
        f"{answer_tokens:,} of answers), without second tries"
    )
    if llm.max_total_tokens is not None and total > llm.max_total_tokens:
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
        self._config = config
        self._llm = config.llm
        self._task = task
        votes = f"x{self._llm.num_annotators}" if self._llm.num_annotators > 1 else ""
        self.version = f"{chat.model}{votes}#{self._prompt_version()}"
        self.judgement_cache_key = self.version
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
        request = make_request(self._task, prompt, response_text, self._config.style)
        feedback = await self._annotate(request)
        if self._config.style.spans or not feedback.usable:
            return feedback
        return await find_spans(self._aligner, prompt, response_text, feedback)

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """Return the spans of this critique. Otherwise as `judge`."""
        request = make_request(self._task, prompt, response_text, self._config.style, critique)
        return await self._annotate(request)

    def _prompt_version(self) -> str:
        """Return a hash of the instructions, a part of the source's version."""
        blank = Prompt(prompt_id="", prompt_text="{input}", task=self._task.name)
        request = make_request(self._task, blank, "{response}", self._config.style)
        text = json.dumps(request.messages)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    async def _annotate(self, request: AnnotationRequest) -> SpanFeedback:
        num_annotators = self._llm.num_annotators if "spans" in request.keys else 1
        async with self._semaphore.get():
            judgements = [self._ask_annotator(request, seed) for seed in range(num_annotators)]
            answers = await gather_all(judgements)
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
        remaining_s = self._config.timeout_s
        now = asyncio.get_running_loop().time  # the clock of the deadline
        chat_request = ChatRequest(
            messages=request.messages,
            schema=build_answer_schema(request),
            max_output_tokens=self._llm.max_output_tokens,
            temperature=self._llm.temperature,
            seed=seed,
        )
        readings: list[ParsedAnswer] = []
        failure: ChatError | None = None  # failure of the last attempt
        for _ in range(self._llm.max_tries):
            async with self.client.slot():
                started = now()
                try:
                    completion = await self._complete(chat_request, remaining_s)
                    failure = None
                except ChatError as error:
                    failure = error
                remaining_s -= now() - started
            if failure:
                if not failure.is_transient:
                    break
                continue
            reading = read_answer(completion, request, source=self.name, version=self.version)
            readings.append(reading)
            if not reading.faults:
                break
            messages = make_follow_up(request, completion.text, reading.faults)
            chat_request = replace(chat_request, messages=messages)
        if failure and not any(reading.feedback.spans for reading in readings):
            self.client.record_failure(failure)
            return make_failed_feedback("failed", source=self.name, version=self.version, reason=str(failure))
        return choose_feedback(readings)

    async def _complete(self, request: ChatRequest, limit_s: float) -> ChatCompletion:
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
    latest = readings[-1]
    if not latest.faults:
        return latest.feedback
    latest_first = reversed(readings)
    best = max(latest_first, key=lambda reading: (reading.feedback.num_located, -len(reading.faults)))
    if best.feedback.spans:
        return best.feedback
    faults = " ".join(best.faults)
    num_answers = "1 answer" if len(readings) == 1 else f"{len(readings)} answers"
    reason = f"{num_answers}, none without faults: {faults}"
    return replace(best.feedback, status="unparsable", reason=reason)
