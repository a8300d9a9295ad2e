"""Asking somebody else and waiting for the answer: a language model, and what every source that waits needs."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from t2g.text.tokenizer import Message

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
class Question:
    """One request."""

    messages: Sequence[Message]
    schema: Mapping[str, Any]  # what JSON the answer is
    max_output_tokens: int
    temperature: float
    seed: int


class ChatFailed(Exception):
    """No answer, and why in a sentence."""

    def __init__(self, kind: str, sentence: str, *, passing: bool = False) -> None:
        super().__init__(sentence)
        self.kind = kind  # each is logged once
        self.passing = passing  # another try may get an answer


class Chat(Protocol):
    """`fleet` is None for those that derive from it."""

    name: str  # for sentences
    model: str
    fleet: Any = None  # as `FeedbackSource.fleet`

    async def complete(self, question: Question) -> Completion:
        """The answer, as JSON of the schema if the model can be made to. May ask again what was not answered: how long
        it may take is the caller's business.

        Raises ChatFailed for what concerns this request; UserError or RunStopped when every other would fail, too.
        """
        ...


def estimate_tokens(text: str) -> int:
    """How many tokens a text is for a tokenizer that is not here: UTF-8 bytes / BYTES_PER_TOKEN, rounded up."""
    return -(-len(text.encode("utf-8", errors="replace")) // BYTES_PER_TOKEN)


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
