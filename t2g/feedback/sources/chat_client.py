"""The client of chat models, with concurrency, rate, deadline and budget; helpers of other sources that wait."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from aiolimiter import AsyncLimiter

from t2g.config import LLMConfig
from t2g.errors import RunStopped
from t2g.text.tokenizer import Message

MAX_LOST = 20  # failed requests in a row, after which the run stops
MESSAGE_TOKENS = 8  # tokens of a message without its text
BYTES_PER_TOKEN = 3  # UTF-8: English has about 4, other scripts 2 to 4; an estimate by 3 is rather high
logger = logging.getLogger(__name__)

Client = TypeVar("Client")


@dataclass(frozen=True, kw_only=True)
class ChatCompletion:
    """One answer and its token counts."""

    text: str
    finish_reason: Literal["stop", "length", "refusal"]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request to a chat model."""

    messages: Sequence[Message]
    schema: Mapping[str, Any]  # JSON schema of the answer; {}: any text
    max_output_tokens: int
    temperature: float
    seed: int


class ChatError(Exception):
    """A request without an answer; the message is the reason."""

    def __init__(self, kind: str, sentence: str, *, is_transient: bool = False) -> None:
        super().__init__(sentence)
        self.kind = kind  # each is logged once
        self.is_transient = is_transient  # a retry may succeed


class Chat(Protocol):
    """A chat model: an endpoint, or a fleet of engines."""

    name: str  # for sentences
    model: str
    fleet: Any = None  # as `FeedbackSource.fleet`

    async def complete(self, request: ChatRequest) -> ChatCompletion:
        """Return the answer, as JSON of the schema if the model supports it.

        The implementation may retry; the caller sets the deadline.

        Raises:
            ChatError: This request failed.
            UserError, RunStopped: Every request would fail.
        """


def estimate_tokens(text: str) -> int:
    """Return an estimate of a text's tokens for an unknown tokenizer: UTF-8 bytes / BYTES_PER_TOKEN, rounded up."""
    return -(-len(text.encode("utf-8", errors="replace")) // BYTES_PER_TOKEN)


def estimate_prompt_tokens(messages: Sequence[Message], schema: Mapping[str, Any]) -> int:
    """Return an estimate of a request's tokens, with the schema: many servers write it into the prompt."""
    texts = sum(estimate_tokens(message["content"]) + MESSAGE_TOKENS for message in messages)
    return texts + estimate_tokens(json.dumps(schema))


class PerLoop(Generic[Client]):
    """A semaphore or client per event loop: both are bound to the loop in which they are first awaited."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._current: tuple[asyncio.AbstractEventLoop, Client] | None = None

    def get(self) -> Client:
        loop = asyncio.get_running_loop()
        if self._current is None or self._current[0] is not loop:
            self._current = (loop, self._make())
        return self._current[1]


class FailureLog:
    """Log of failed judgements: each kind once. The metrics of failed feedback count all of them."""

    def __init__(self) -> None:
        self._logged_kinds: set[str] = set()

    def log(self, kind: str, sentence: str) -> None:
        if kind not in self._logged_kinds:
            self._logged_kinds.add(kind)
            logger.warning("feedback failed: %s (logged once, counted each time)", sentence)


class ChatClient:
    """Client of a chat model with a deadline per request.

    It observes `llm.concurrency`, `llm.requests_per_minute` and the budget `llm.max_total_tokens`.
    """

    def __init__(self, chat: Chat, llm: LLMConfig, timeout_s: float) -> None:
        self.chat = chat
        self._llm = llm
        self._timeout_s = timeout_s
        self._semaphore = PerLoop(lambda: asyncio.Semaphore(llm.concurrency))
        # Requests are spaced evenly. Retries of the endpoint's client are not counted: it follows the server's limits.
        per_minute = llm.requests_per_minute
        self._limiter = PerLoop(lambda: AsyncLimiter(1, 60 / per_minute) if per_minute else nullcontext())
        self._failures = FailureLog()
        self._num_lost = 0  # failed requests in a row
        self.num_tokens = 0  # tokens of all prompts and answers

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until a request may start. The wait does not count towards deadlines."""
        async with self._semaphore.get(), self._limiter.get():
            yield

    async def complete(self, request: ChatRequest, limit_s: float | None = None) -> ChatCompletion:
        """Return the answer within limit_s, by default timeout_s, without waiting for a slot.

        Raises:
            ChatError: The budget is spent, the request timed out, or as `Chat.complete`.
        """
        cap = self._llm.max_total_tokens
        if cap is not None and self.num_tokens >= cap:
            sentence = f"{self.num_tokens} tokens are spent, and llm.max_total_tokens={cap}; raise it to go on"
            raise ChatError("cap", sentence)
        try:
            async with asyncio.timeout(self._timeout_s if limit_s is None else limit_s):
                completion = await self.chat.complete(request)
        except TimeoutError:
            # The server may have billed the prompt all the same.
            self.num_tokens += estimate_prompt_tokens(request.messages, request.schema)
            sentence = f"{self.chat.name} gave no answer within timeout_s={self._timeout_s:g}, all tries"
            raise ChatError("timeout", sentence) from None
        self._num_lost = 0
        self.num_tokens += completion.prompt_tokens + completion.output_tokens
        return completion

    async def request(self, request: ChatRequest) -> ChatCompletion:
        """Wait for a slot and return the answer. Raises as `complete` and `record_failure`."""
        async with self.slot():
            try:
                return await self.complete(request)
            except ChatError as error:
                self.record_failure(error)
                raise

    def record_failure(self, error: ChatError) -> None:
        """Log the failure, once per kind.

        Raises:
            RunStopped: MAX_LOST requests in a row failed.
        """
        self._failures.log(error.kind, str(error))
        if error.kind not in ("cap", "refusal"):
            self._num_lost += 1
            if self._num_lost >= MAX_LOST:
                raise RunStopped(f"{MAX_LOST} requests in a row got no answer, the last because: {error}")
