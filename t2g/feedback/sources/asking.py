"""A language model that is asked for one answer: what the annotator needs of it, and how it may fail to answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from t2g.text.tokenizer import Message

BYTES_PER_TOKEN = 3  # UTF-8: English has about 4, other scripts 2 to 4, so an estimate by it is rather high


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
