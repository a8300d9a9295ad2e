"""Asking somebody else and waiting for the answer: a language model, and what every source that waits needs."""

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

MAX_LOST = 20  # questions in a row that got no answer: nobody will get one
MESSAGE_TOKENS = 8  # what a message takes beside its text
BYTES_PER_TOKEN = 3  # UTF-8: English has about 4, other scripts 2 to 4, so an estimate by it is rather high
logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer, and what it cost."""

    text: str
    finish_reason: Literal["stop", "length", "refusal"]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request."""

    messages: Sequence[Message]
    schema: Mapping[str, Any]  # what JSON the answer is; {}: any text
    max_output_tokens: int
    temperature: float
    seed: int


class ChatError(Exception):
    """No answer, and why in a sentence."""

    def __init__(self, kind: str, sentence: str, *, is_transient: bool = False) -> None:
        super().__init__(sentence)
        self.kind = kind  # each is logged once
        self.is_transient = is_transient  # another try may get an answer


class Chat(Protocol):
    """`fleet` is None for those that derive from it."""

    name: str  # for sentences
    model: str
    fleet: Any = None  # as `FeedbackSource.fleet`

    async def complete(self, question: ChatRequest) -> Completion:
        """The answer, as JSON of the schema if the model can be made to. May ask again what was not answered: how long
        it may take is the caller's business.

        Raises ChatError for what concerns this request; UserError or RunStopped when every other would fail, too.
        """


def estimate_tokens(text: str) -> int:
    """How many tokens a text is for a tokenizer that is not here: UTF-8 bytes / BYTES_PER_TOKEN, rounded up."""
    return -(-len(text.encode("utf-8", errors="replace")) // BYTES_PER_TOKEN)


def prompt_tokens(messages: Sequence[Message], schema: Mapping[str, Any]) -> int:
    """Estimate of a request; many servers write the schema into the prompt."""
    texts = sum(estimate_tokens(message["content"]) + MESSAGE_TOKENS for message in messages)
    return texts + estimate_tokens(json.dumps(schema))


class PerLoop(Generic[T]):
    """A semaphore or a client, made anew when another event loop runs: both belong to the loop they first wait in."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        if self._of is None or self._of[0] is not loop:
            self._of = (loop, self._make())
        return self._of[1]


class FailureLog:
    """Says each kind of failed judgement once, in a sentence; what counts failed feedback says how often."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, kind: str, sentence: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("feedback failed: %s (said once, counted each time)", sentence)


class ChatClient:
    """A chat model that is asked many questions: with `llm.concurrency` open requests, `llm.requests_per_minute`, a
    deadline, and `llm.max_total_tokens` in all."""

    def __init__(self, chat: Chat, llm: LLMConfig, timeout_s: float) -> None:
        self.chat, self._llm, self._timeout_s = chat, llm, timeout_s
        self._place = PerLoop(lambda: asyncio.Semaphore(llm.concurrency))
        # Requests so far apart that no minute has more than its share. The retries of the endpoint's client come on
        # top: it heeds what the server says.
        per_minute = llm.requests_per_minute
        self._pace = PerLoop(lambda: AsyncLimiter(1, 60 / per_minute) if per_minute else nullcontext())
        self._failures = FailureLog()
        self._num_lost = 0  # questions in a row without an answer
        self.num_tokens = 0  # spent so far, prompts and answers

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for it before a question: no deadline counts the wait."""
        async with self._place.get(), self._pace.get():
            yield

    async def complete(self, question: ChatRequest, limit_s: float | None = None) -> Completion:
        """An answer within limit_s, by default timeout_s. Raises ChatError at the cap, else as `Chat.complete`."""
        cap = self._llm.max_total_tokens
        if cap is not None and self.num_tokens >= cap:
            sentence = f"{self.num_tokens} tokens are spent, and llm.max_total_tokens={cap}; raise it to go on"
            raise ChatError("cap", sentence)
        try:
            async with asyncio.timeout(self._timeout_s if limit_s is None else limit_s):
                completion = await self.chat.complete(question)
        except TimeoutError:
            # It may have cost something all the same, and nobody will say how much.
            self.num_tokens += prompt_tokens(question.messages, question.schema)
            sentence = f"{self.chat.name} gave no answer within timeout_s={self._timeout_s:g}, all tries"
            raise ChatError("timeout", sentence) from None
        self._num_lost = 0
        self.num_tokens += completion.prompt_tokens + completion.output_tokens
        return completion

    async def ask(self, question: ChatRequest) -> Completion:
        """`complete`, in its turn. Also raises as `failed`."""
        async with self.turn():
            try:
                return await self.complete(question)
            except ChatError as error:
                self.failed(error)
                raise

    def failed(self, failed: ChatError) -> None:
        """Says each kind once. RunStopped when nobody gets an answer any more."""
        self._failures.say(failed.kind, str(failed))
        if failed.kind not in ("cap", "refusal"):
            self._num_lost += 1
            if self._num_lost >= MAX_LOST:
                raise RunStopped(f"{MAX_LOST} questions in a row got no answer, the last because: {failed}")
