"""A chat model behind an OpenAI-compatible server: one request, one answer. Who asks again is t2g.feedback.sources.llm.

The key goes into the request's header and nowhere else: what a server or a library says is scrubbed of it.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from t2g.config import LLMConfig
from t2g.errors import RunStopped, UserError
from t2g.feedback.sources.asking import ChatFailed, Completion, Question, estimate_tokens
from t2g.feedback.sources.waiting import PerLoop

if TYPE_CHECKING:
    import openai

MAX_BODY_BYTES = 4 * 2**20  # of a response that is read
PASSING = {408, 409, 425, 429}  # status codes, beside 500 and above


class EndpointChat:
    """The server at `llm.url`. UserError without a key in the environment."""

    def __init__(self, config: LLMConfig, *, environ: Mapping[str, str] = os.environ) -> None:
        assert config.url is not None and config.model is not None, "see FeedbackConfig"
        key = environ.get(config.key_env, "").strip()
        if not key:
            raise UserError(
                f"llm.key_env names {config.key_env}, which is not set; "
                "export it (any word will do where the server asks for none)"
            )
        if not (key.isascii() and key.isprintable()):  # the HTTP library would refuse it with a message that holds it
            raise UserError(f"the environment variable {config.key_env} holds characters that no key has")
        import openai  # noqa: F401 it takes a second, which is no request's

        self._config, self._key = config, key
        self.model = config.model
        self.name = f"{config.model} at {config.url}"
        self._key_works = False
        self._client = PerLoop(self._open)

    def _open(self) -> "openai.AsyncOpenAI":
        import openai

        return openai.AsyncOpenAI(
            base_url=self._config.url,
            api_key=self._key,
            timeout=self._config.request_timeout_s,
            max_retries=0,  # ours: theirs would run past the deadline
        )

    async def complete(self, question: Question) -> Completion:
        import openai

        try:
            async with self._client.get().chat.completions.with_streaming_response.create(
                model=self.model,
                messages=list(question.messages),  # type: ignore[arg-type]
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "feedback", "strict": True, "schema": dict(question.schema)},
                },
                max_completion_tokens=question.max_output_tokens,
                temperature=question.temperature,
                seed=question.seed,
            ) as response:
                self._key_works = True
                body = await read_body(response)
        except openai.APIStatusError as error:
            raise self._refused(error) from None
        except openai.OpenAIError as error:
            cause = f": {error.__cause__}" if error.__cause__ and str(error.__cause__) else ""
            raise self._failed("connection", f"{error}{cause}", passing=True) from None
        except ConnectionError as error:
            raise self._failed("connection", str(error), passing=True) from None
        try:
            said = read_completion(body, prompt="".join(message["content"] for message in question.messages))
        except ValueError as error:
            raise self._failed("answer", str(error), passing=False) from None
        # Nobody reads a refusal but people. An answer stays as it is: a key may be a word like "any".
        return replace(said, text=self._words(said.text)) if said.finish_reason == "refusal" else said

    def _refused(self, error: "openai.APIStatusError") -> Exception:
        """What an HTTP status above 399 means for this request and for all others."""
        status = error.status_code
        words = self._words(f"HTTP {status}: {error.message}")
        if status == 401 or (status == 403 and not self._key_works):  # some say 403 of an input that they do not like
            key = f"the key in the environment variable {self._config.key_env}"
            return UserError(f"llm.url={self._config.url} refuses {key}: {words}")
        if status == 404:
            return UserError(f"llm.url={self._config.url} does not know llm.model={self.model} or the path: {words}")
        if error.code == "insufficient_quota":
            return RunStopped(f"the account of {self._config.key_env} has nothing left to spend: {words}")
        wait_s = retry_after(error.response.headers, now=time.time())
        return self._failed(f"HTTP {status}", words, passing=status in PASSING or status >= 500, retry_after_s=wait_s)

    def _failed(self, kind: str, words: str, *, passing: bool, retry_after_s: float | None = None) -> ChatFailed:
        sentence = f"{self.name}: {self._words(words)}"
        return ChatFailed(kind, sentence, passing=passing, retry_after_s=retry_after_s)

    def _words(self, words: str) -> str:
        """In one printable line, without the key (servers like to repeat it), and only then cut."""
        for key in (self._key, self._key.replace("/", r"\/")):  # as some write it in JSON
            words = words.replace(key, "***")
        line = " ".join(words.split())[:300]
        return "".join(character if character.isprintable() else "?" for character in line)


async def read_body(response: Any) -> bytes:
    """The response's first MAX_BODY_BYTES and no more. ConnectionError when it ends before it should."""
    body = bytearray()
    try:
        async for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
    except Exception as error:  # whatever HTTP library openai brings along
        raise ConnectionError(f"the answer broke off: {type(error).__name__}: {error}") from error
    return bytes(body)


def read_completion(body: bytes, *, prompt: str) -> Completion:
    """The first choice of a chat completion. ValueError for anything else: a proxy's web page, JSON that is cut off.

    The error shows the whole body: half a key, cut here, would be found by nobody.
    Tokens that the server does not report are estimated from `prompt` and the answer.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"an answer of more than {MAX_BODY_BYTES} bytes")
    shown = body.decode(errors="replace")
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"an answer that is no JSON: {shown}") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(message, dict):
        raise ValueError(f"an answer without choices or without a message: {shown}")
    refusal, content = message.get("refusal"), message.get("content")
    if not isinstance(content, str | None):
        raise ValueError(f"a message whose content is no text: {shown}")
    reason = first.get("finish_reason")
    refused = reason == "content_filter" or (isinstance(refusal, str) and refusal)
    text = refusal if isinstance(refusal, str) and refusal else content or ""
    usage = answer.get("usage")
    return Completion(
        text=text,
        finish_reason="refusal" if refused else "length" if reason == "length" else "stop",
        prompt_tokens=_count(usage, "prompt_tokens", estimate_tokens(prompt)),
        output_tokens=_count(usage, "completion_tokens", estimate_tokens(text)),
    )


def _count(usage: Any, key: str, otherwise: int) -> int:
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else otherwise


def retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds that the server asks to wait, from 0; None when it does not, or in no number and no date.

    Names of headers in lower case; `now` in seconds since 1970.

        retry_after({"retry-after": "1.5"}, now=0) == 1.5
        retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}, now=20) == 40
    """
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit_s
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - now
            except ValueError:
                continue
        if not math.isnan(seconds):
            return max(0.0, seconds)
    return None
