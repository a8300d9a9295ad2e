"""Feedback from a language model behind an OpenAI-compatible server."""

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from t2g.config import FeedbackConfig
from t2g.errors import UserError
from t2g.feedback.parse import answer_schema, no_feedback, parse_answer
from t2g.feedback.prompts import prompt_version
from t2g.feedback.waiting import FailureLog, PerLoop
from t2g.tasks.base import Task
from t2g.types import FinishReason, Prompt, SpanFeedback

if TYPE_CHECKING:
    import openai


class EndpointFeedback:
    """An OpenAI-compatible server that is asked for an answer in the schema of `answer_schema`."""

    name = "endpoint"

    def __init__(self, config: FeedbackConfig, task: Task, *, environ: Mapping[str, str] = os.environ) -> None:
        if config.endpoint_model is None:
            raise UserError("feedback.source=endpoint needs feedback.endpoint_model, a name that the server knows")
        key = environ.get(config.endpoint_key_env)
        if not key:
            raise UserError(
                f"feedback.endpoint_key_env names {config.endpoint_key_env}, which is not set; "
                "export it (any word will do where the server asks for none)"
            )
        self._config, self._task, self._model, self._key = config, task, config.endpoint_model, key
        self._version = f"{config.endpoint_model}#{prompt_version(task)}"
        self._session = PerLoop(self._open)
        self._failures = FailureLog()

    def _open(self) -> tuple["openai.AsyncOpenAI", asyncio.Semaphore]:
        import openai

        client = openai.AsyncOpenAI(
            base_url=self._config.endpoint_url,
            api_key=self._key,
            timeout=self._config.timeout_s,
            max_retries=0,  # ours: theirs would run past the deadline
        )
        return client, asyncio.Semaphore(self._config.concurrency)

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        import openai

        client, turn = self._session.get()
        try:
            async with turn, asyncio.timeout(self._config.timeout_s):
                answer, finish_reason = await self._ask(client, prompt, response_text)
        except (openai.OpenAIError, TimeoutError, ValueError) as error:
            reason = str(error).strip() or f"no answer within feedback.timeout_s={self._config.timeout_s:g}"
            kind = type(error).__name__
            self._failures.say(kind, f"endpoint {self._config.endpoint_url}: {kind}: {reason:.300}")
            return no_feedback("failed", source=self.name, version=self._version)
        return parse_answer(answer, response_text, source=self.name, version=self._version, finish_reason=finish_reason)

    async def _ask(self, client: "openai.AsyncOpenAI", prompt: Prompt, response_text: str) -> tuple[str, FinishReason]:
        """The answer; what may pass by itself is tried again with growing pauses, until the caller's deadline."""
        import openai
        import tenacity

        passing = (openai.RateLimitError, openai.APIConnectionError, openai.InternalServerError)
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(passing),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=20),
        ):
            with attempt:
                completion = await client.chat.completions.create(
                    model=self._model,
                    messages=self._task.feedback_messages(prompt, response_text, None),  # type: ignore[arg-type]
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "feedback", "strict": True, "schema": answer_schema()},
                    },
                    max_completion_tokens=self._config.engine.max_new_tokens,
                    temperature=0,
                )
        return _read_completion(completion)


def _read_completion(completion: Any) -> tuple[str, FinishReason]:
    """Text of the first choice, "" for a refusal. ValueError for anything else: the client checks no types, and a
    proxy's web page arrives as a plain text.
    """
    choices = getattr(completion, "choices", None)
    first = choices[0] if isinstance(choices, list) and choices else None
    message = getattr(first, "message", None)
    if not hasattr(message, "content"):
        raise ValueError(f"an answer without choices or without a message: {completion!s:.100}")
    content = message.content
    if not isinstance(content, str | None):
        raise ValueError(f"a message whose content is no text: {content!s:.100}")
    return content or "", "length" if getattr(first, "finish_reason", None) == "length" else "stop"
