"""A chat model behind an OpenAI-compatible server.

`openai` retries transient errors (429, 5xx, no connection) after the server's Retry-After, else with exponential
backoff. It retries neither an exhausted quota nor a Retry-After above two minutes. `t2g.feedback.sources.llm` sets the
deadline of all attempts.

Key and prompt are sent to `llm.url` only: redirects are not followed. Secrets in texts of servers and libraries are
masked.
"""

import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

from pydantic import BaseModel, Field, ValidationError

from t2g.config import LLMConfig
from t2g.config.texts import mask_secrets
from t2g.config.validation_errors import format_first_error
from t2g.errors import MissingLocally, RunStopped, UserError
from t2g.feedback.sources.chat_client import Chat, ChatError, ChatRequest, Completion, PerLoop, estimate_tokens

if TYPE_CHECKING:
    import openai

MAX_BODY_BYTES = 4 * 2**20  # of an answer; the rest is not read
MAX_ERROR_BYTES = 64 * 2**10  # of the body of an error
QUOTA = re.compile(  # errors that are not worth a retry
    rb'"(code|type)"\s*:\s*"(insufficient_(quota|balance|funds)|\w*quota_(exceeded|error)|billing_\w+)"'
)
PROXY = re.compile(r"(https?://)?([^/\s@]*@)?([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?/?")
MAX_MESSAGE_CHARS = 2000  # of an error
MAX_RETRIES = 10  # about a minute of backoff per request, unless the deadline of the judgement is earlier


class EndpointChat(Chat):
    """The server at `llm.url`. MissingLocally without a key in the environment."""

    def __init__(self, config: LLMConfig) -> None:
        assert config.url is not None and config.model is not None, "see FeedbackConfig"
        key = os.environ.get(config.key_env, "").strip()
        if not key:
            raise MissingLocally(
                f"llm.key_env names {config.key_env}, which is not set; "
                "export it (with any value if the server needs no key)"
            )
        if not (key.isascii() and key.isprintable()):  # the HTTP library's error message would contain the key
            raise UserError(f"the environment variable {config.key_env} contains characters that no key has")
        check_proxies()
        import openai  # noqa: F401 the import takes a second, which must not count towards a request

        self._config, self._key = config, key
        self.model = config.model
        self.name = f"{config.model} at {config.url}"
        self._key_works = False
        self._client = PerLoop(self._open)

    def _open(self) -> "openai.AsyncOpenAI":
        import openai

        class Client(openai.DefaultAsyncHttpxClient):
            """Bounds the bodies of errors, which `openai` reads without a limit."""

            async def send(self, *arguments: Any, **options: Any) -> Any:
                response = await super().send(*arguments, **options)
                return response if response.is_success else await read_error(response)

        return openai.AsyncOpenAI(
            base_url=self._config.url,
            api_key=self._key,
            timeout=self._config.request_timeout_s,
            max_retries=MAX_RETRIES,
            http_client=Client(follow_redirects=False),
        )

    async def complete(self, request: ChatRequest) -> Completion:
        import openai

        schema = {"name": "feedback", "strict": True, "schema": dict(request.schema)}
        try:
            async with self._client.get().chat.completions.with_streaming_response.create(
                model=self.model,
                messages=list(request.messages),  # type: ignore[arg-type]
                response_format={"type": "json_schema", "json_schema": schema} if request.schema else openai.omit,
                max_completion_tokens=request.max_output_tokens,
                temperature=request.temperature,
                seed=request.seed,
            ) as response:
                self._key_works = True
                body = await read_body(response.iter_bytes())
            completion = read_completion(body, prompt="".join(message["content"] for message in request.messages))
        except openai.APIStatusError as error:
            raise self._convert_status_error(error) from None
        except openai.OpenAIError as error:
            cause = f": {error.__cause__}" if error.__cause__ and str(error.__cause__) else ""
            raise self._make_error("connection", f"{error}{cause}") from None
        except ConnectionError as error:  # the client does not retry once an answer has begun
            raise self._make_error("connection", str(error), is_transient=True) from None
        except ValueError as error:
            raise self._make_error("answer", str(error)) from None
        # Only a refusal is masked, which goes to logs: a key may be a common word like "any" and occur in an answer.
        is_refusal = completion.finish_reason == "refusal"
        return replace(completion, text=self._mask(completion.text)) if is_refusal else completion

    def _convert_status_error(self, error: "openai.APIStatusError") -> Exception:
        """Return the exception of an HTTP status above 399: ChatError, or one for all requests."""
        status = error.status_code
        message = self._mask(f"HTTP {status}: {error.message}")
        if target := error.response.headers.get("location"):
            return UserError(
                f"llm.url={self._config.url} redirects to {self._mask(target.partition('?')[0])}; redirects are not "
                "followed, because they would send the prompts there; set llm.url to the right address"
            )
        if is_quota_exhausted(status, error.response.content):
            return RunStopped(f"the account of {self._config.key_env} has nothing left to spend: {message}")
        if status == 401 or (status == 403 and not self._key_works):  # some servers answer 403 to an unwanted input
            key = f"the key in the environment variable {self._config.key_env}"
            return UserError(f"llm.url={self._config.url} refuses {key}: {message}")
        if status == 404:
            return UserError(f"llm.url={self._config.url} does not know llm.model={self.model} or the path: {message}")
        return self._make_error(f"HTTP {status}", message)

    def _make_error(self, kind: str, message: str, *, is_transient: bool = False) -> ChatError:
        return ChatError(kind, f"{self.name}: {self._mask(message)}", is_transient=is_transient)

    def _mask(self, message: str) -> str:
        """Return the message as one printable line, without the key, which servers may repeat; truncated last."""
        for key in (self._key, self._key.replace("/", r"\/")):  # the second form occurs in JSON
            message = message.replace(key, "***")
        line = " ".join(mask_secrets(message).split())[:MAX_MESSAGE_CHARS]
        return "".join(character if character.isprintable() else "?" for character in line)


def check_proxies() -> None:
    """Raise MissingLocally for a malformed proxy: the HTTP library's message would contain its password."""
    for scheme, url in getproxies().items():
        if scheme in ("http", "https", "all") and not PROXY.fullmatch(url):
            raise MissingLocally(f"the environment variable {scheme.upper()}_PROXY needs the form http://host:port")


async def read_body(chunks: AsyncIterator[bytes], limit: int = MAX_BODY_BYTES) -> bytes:
    """Return the first `limit` bytes and at most a chunk more. ConnectionError if the body is incomplete."""
    body = bytearray()
    try:
        async for chunk in chunks:
            body += chunk
            if len(body) > limit:
                break
    except Exception as error:  # of the HTTP library that openai uses
        raise ConnectionError(f"the answer broke off: {type(error).__name__}: {error}") from error
    return bytes(body)


async def read_error(response: Any) -> Any:
    """Return an HTTP response with the start of the body, marked against a retry if the quota is exhausted."""
    try:
        body = (await read_body(response.aiter_bytes(), MAX_ERROR_BYTES))[:MAX_ERROR_BYTES]
    except ConnectionError:
        body = b""  # the status suffices
    await response.aclose()
    headers = {name: text for name, text in response.headers.items() if not name.startswith("content-")}
    if is_quota_exhausted(response.status_code, body):
        headers["x-should-retry"] = "false"
    return type(response)(response.status_code, headers=headers, content=body, request=response.request)


def is_quota_exhausted(status: int, body: bytes) -> bool:
    """Return whether an error means that the account can pay for no further request.

    >>> is_quota_exhausted(429, b'{"error": {"code": "insufficient_quota"}}'), is_quota_exhausted(429, b"slow down")
    (True, False)
    """
    return status == 402 or (status in (400, 403, 429) and QUOTA.search(body) is not None)


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = Field(None, ge=0)
    completion_tokens: int | None = Field(None, ge=0)


class _Body(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def read_completion(body: bytes, *, prompt: str) -> Completion:
    """Return the first choice of a chat completion.

    Tokens that the server does not report are estimated from `prompt` and the answer.

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
    message, reason, usage = parsed.choices[0].message, parsed.choices[0].finish_reason, parsed.usage or _Usage()
    is_refusal = reason == "content_filter" or message.refusal
    text = message.refusal or message.content or ""
    return Completion(
        text=text,
        finish_reason="refusal" if is_refusal else "length" if reason == "length" else "stop",
        prompt_tokens=estimate_tokens(prompt) if usage.prompt_tokens is None else usage.prompt_tokens,
        output_tokens=estimate_tokens(text) if usage.completion_tokens is None else usage.completion_tokens,
    )
