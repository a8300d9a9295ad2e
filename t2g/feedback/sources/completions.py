"""The bodies of OpenAI-compatible servers: chat completions, and errors in all their forms. Bodies are untrusted."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from t2g.config.validation_errors import format_first_error
from t2g.feedback.sources.chat_client import ChatCompletion, estimate_tokens

MAX_BODY_BYTES = 4 * 2**20  # bytes of an answer; the rest is not read
MAX_TOKENS = 10**9  # tokens of one request; a larger number is an error that would use up llm.max_total_tokens
REASON_KEYS = ("error", "errors", "message", "msg", "detail", "error_description", "reason", "title", "metadata", "raw")
UNFINISHED = {"code": 503, "message": "the server could not finish the answer"}
MAX_REASONS = 4  # reasons of an error, for a message
MAX_PATH_CHARS = 200  # name of the field that a reason is about
MAX_PATH_PARTS = 20
QUOTA = re.compile(  # errors that are not worth a retry
    rb'"(code|type)"\s*:\s*"(insufficient_(quota|balance|funds)|\w*quota_(exceeded|error)|billing_\w+)"'
)
STATUS = re.compile(r"[45]\d\d", re.ASCII)
RATE = re.compile(r"rate_?limit|too_?many|throttl", re.I)
BUSY = re.compile(r"overload|unavailable|server_?error|internal|timeout", re.I)
TAG = re.compile(r"<[^<>]*>")


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None

    @field_validator("content", mode="before")
    @classmethod
    def join_parts(cls, content: Any) -> Any:
        """Return the text of a content in parts; parts of other types, as thinking, are left out."""
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            return content
        texts = [part.get("text") for part in content if part.get("type") in ("text", "output_text")]
        return "".join(text for text in texts if isinstance(text, str))


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)


class _Body(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: Any = None


def read_completion(body: bytes, *, prompt: str) -> ChatCompletion:
    """Return the first choice of a chat completion.

    Without content the text is that of the reasoning: some servers put an answer there. Reasoning that was truncated
    has no answer. Tokens that the server does not report are estimated from `prompt` and the answer.

    Raises:
        ValueError: The body is no chat completion. The message has the whole body: the caller masks the key, and a key
            truncated here would not be found.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"an answer of more than {MAX_BODY_BYTES} bytes")
    try:
        parsed = _Body.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(f"no chat completion, {format_first_error(error)}: {body.decode(errors='replace')}") from None
    choice = parsed.choices[0]
    message = choice.message
    texts = [message.refusal, message.content]
    if choice.finish_reason != "length":
        texts += [message.reasoning_content, message.reasoning]
    text = next((text for text in texts if isinstance(text, str) and text.strip()), "")

    usage = _read_usage(parsed.usage)
    prompt_tokens = usage.prompt_tokens
    if prompt_tokens is None:
        prompt_tokens = estimate_tokens(prompt)
    output_tokens = usage.completion_tokens
    if output_tokens is None:
        output_tokens = estimate_tokens(text)

    finish_reason: Literal["stop", "length", "refusal"] = "stop"
    if choice.finish_reason == "content_filter" or message.refusal:
        finish_reason = "refusal"
    elif choice.finish_reason == "length":
        finish_reason = "length"
    return ChatCompletion(
        text=text, finish_reason=finish_reason, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )


def _read_usage(usage: Any) -> _Usage:
    """Return the token counts; none of a usage in another form."""
    try:
        return _Usage.model_validate(usage)
    except ValidationError:
        return _Usage()


def extract_error(body: bytes) -> bytes | None:
    """Return the body of the error in an answer with status 200, or None.

    OpenRouter sends the error in a choice if the model fails after its answer has begun. The text of that choice is
    left out: its words would be read as the error's.

    >>> extract_error(b'{"choices": [{"message": {"content": ""}, "finish_reason": "error", "error": {"code": 502}}]}')
    b'{"error": {"code": 502}}'
    """
    if b'"error"' not in body:
        return None
    answer = _load(body)
    if not isinstance(answer, dict):
        return None
    choices = answer.get("choices")
    if not choices:
        return body if answer.get("error") else None
    first = choices[0] if isinstance(choices, list) else None
    if not isinstance(first, dict):
        return None
    error = first.get("error")
    if first.get("finish_reason") == "error":
        error = error or answer.get("error") or UNFINISHED
    return json.dumps({"error": error}).encode() if error else None


def find_error_status(body: bytes) -> int:
    """Return the HTTP status that an error with status 200 names, 400 without one.

    >>> find_error_status(b'{"error": {"code": 429, "message": "slow down"}}')
    429
    >>> find_error_status(b'{"error": {"type": "overloaded_error"}}'), find_error_status(b'{"error": "no such thing"}')
    (503, 400)
    """
    answer = _load(body)
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return 400
    names = [str(error[key]) for key in ("code", "status", "type") if error.get(key) is not None]
    for name in names:
        if STATUS.fullmatch(name):
            return int(name)
    if any(map(RATE.search, names)):
        return 429
    if any(map(BUSY.search, names)):
        return 503
    return 400


def is_quota_exhausted(status: int, body: bytes) -> bool:
    """Return whether an error means that the account can pay for no further request.

    >>> is_quota_exhausted(429, b'{"error": {"code": "insufficient_quota"}}'), is_quota_exhausted(429, b"slow down")
    (True, False)
    """
    if status == 402:
        return True
    return status in (400, 403, 429) and QUOTA.search(body) is not None


def find_reason(body: bytes) -> str:
    """Return what the body of an error says; "" for an empty body.

    >>> find_reason(b'{"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}')
    'body.seed: Extra inputs are not permitted'
    >>> find_reason(b"<html><title>502</title><h1>Bad Gateway</h1></html>")
    '502 Bad Gateway'
    """
    text = body.decode(errors="replace")
    answer = _load(body)
    if answer is None and "<" in text:
        words = TAG.sub(" ", text).split()
        return " ".join(words)
    if answer is None:
        return text.strip()
    reasons: dict[str, None] = {}
    for reason in _find_reasons(answer, depth=8):
        reasons[reason] = None
        if len(reasons) == MAX_REASONS:
            break
    return "; ".join(reasons) or text.strip()


def _load(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _find_reasons(value: Any, depth: int) -> Iterator[str]:
    """Yield the texts of an error below REASON_KEYS, each with the field of the request that it is about."""
    if isinstance(value, str) and value.strip():
        yield value.strip()
    if depth == 0:
        return
    if isinstance(value, list):
        for item in value:
            yield from _find_reasons(item, depth - 1)
    if isinstance(value, dict):
        field = ""
        loc = value.get("loc")
        if isinstance(loc, list) and loc:
            names = [str(part)[:MAX_PATH_CHARS] for part in loc[:MAX_PATH_PARTS]]
            path = ".".join(names)[:MAX_PATH_CHARS]
            field = f"{path}: "
        for key in REASON_KEYS:
            for reason in _find_reasons(value.get(key), depth - 1):
                yield field + reason
