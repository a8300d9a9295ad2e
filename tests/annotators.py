"""An annotator whose model says what a script tells it to."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from fake_endpoint import KEY_VARIABLE, answer, span
from loop_clock import LoopClock

from t2g.config import FeedbackConfig, StyleConfig
from t2g.feedback.sources.chat_client import Chat, ChatCompletion, ChatRequest
from t2g.feedback.sources.llm import LLMFeedback
from t2g.tasks.base import get_task
from t2g.text.tokenizer import Message
from t2g.types import Prompt, SpanFeedback

RESPONSE = "A red phone, a red bag."
GOOD = answer("The phone is right. The bag is wrong.", span("phone", "good", phrase="The phone is right"))
MISS = answer("The case is wrong.", span("case", "poor", phrase="case"), span("bag", "poor", phrase="wrong"))


def prompt(**payload: Any) -> Prompt:
    blank = np.zeros(0, np.int32)
    return Prompt(prompt_id="7", prompt_ids=blank, prompt_text="What hums?", task="summarization", payload=payload)


def config(
    *, style: StyleConfig | None = None, align: Any = None, timeout_s: float = 60.0, **llm: Any
) -> FeedbackConfig:
    fields = {"model": "judge", "key_env": KEY_VARIABLE, "request_timeout_s": 30.0} | llm
    return FeedbackConfig(source="llm", llm=fields, style=style or StyleConfig(), align=align, timeout_s=timeout_s)  # type: ignore[arg-type]


class ScriptedChat(Chat):
    """Gives scripted answers or errors; records the requests."""

    model = name = "scripted"
    clock: LoopClock | None = None  # of the event loop; without one an answer takes real time

    def __init__(self, *script: str | ChatCompletion | Exception | Callable[[int], str], delay_s: float = 0.0) -> None:
        self.script = script
        self.delay_s = delay_s
        self.requests: list[Sequence[Message]] = []
        self.schemas: list[Mapping[str, Any]] = []
        self.times: list[float] = []  # of the event loop at each
        self.answered = asyncio.Event()

    async def complete(self, question: ChatRequest) -> ChatCompletion:
        scripted = self.script[min(len(self.requests), len(self.script) - 1)]
        self.requests.append(question.messages)
        self.schemas.append(question.schema)
        self.times.append(asyncio.get_running_loop().time())
        wait = self.clock.wait if self.clock else asyncio.sleep
        await wait(self.delay_s)
        self.answered.set()
        if isinstance(scripted, Exception):
            raise scripted
        if isinstance(scripted, ChatCompletion):
            return scripted
        text = scripted if isinstance(scripted, str) else scripted(question.seed)
        return ChatCompletion(text=text, finish_reason="stop", prompt_tokens=100, output_tokens=10)


def annotator(chat: Any, **fields: Any) -> LLMFeedback:
    return LLMFeedback(chat, config(**fields), get_task("summarization"))


def judge(source: LLMFeedback, response: str = RESPONSE, **payload: Any) -> SpanFeedback:
    return asyncio.run(source.judge(prompt(**payload), response))


def spans(feedback: SpanFeedback, response: str = RESPONSE) -> list[tuple[str, int]]:
    return [(response[s.start : s.end], s.label) for s in feedback.spans]


def many(source: LLMFeedback, count: int) -> list[SpanFeedback]:
    async def run() -> list[SpanFeedback]:
        return await asyncio.gather(*(source.judge(prompt(), RESPONSE) for _ in range(count)))

    return asyncio.run(run())


def ask(
    *script: str | ChatCompletion | Exception | Callable[[int], str], **fields: Any
) -> tuple[SpanFeedback, ScriptedChat]:
    """What a scripted model's answers become, and the model."""
    chat = ScriptedChat(*script)
    return judge(annotator(chat, **fields)), chat
