"""A chat model behind an OpenAI-compatible server.

`openai` retries what may pass (429, 5xx, no connection): when the server's Retry-After says, else after pauses that
double. It does not retry an exhausted quota, nor where the server asks for more than two minutes.
`t2g.feedback.sources.llm` has the deadline of all tries.

The key and the prompt go to `llm.url` only: no redirect is followed. Every text of a server or a library is masked.
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
QUOTA = re.compile(  # errors that another try cannot pass
    rb'"(code|type)"\s*:\s*"(insufficient_(quota|balance|funds)|\w*quota_(exceeded|error)|billing_\w+)"'
)
PROXY = re.compile(r"(https?://)?([^/\s@]*@)?([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?/?")
MAX_WORDS = 2000  # characters of an error that are told
MAX_RETRIES = 10  # a minute of pauses for one request; the deadline of the judgement may end them before


class EndpointChat(Chat):
    """The server at `llm.url`. UserError without a key in the environment."""

    def __init__(self, config: LLMConfig) -> None:
        assert config.url is not None and config.model is not None, "see FeedbackConfig"
        key = os.environ.get(config.key_env, "").strip()
        if not key:
            raise MissingLocally(
                f"llm.key_env names {config.key_env}, which is not set; "
                "export it (any word will do where the server asks for none)"
            )
        if not (key.isascii() and key.isprintable()):  # the HTTP library would refuse it with a message that holds it
            raise UserError(f"the environment variable {config.key_env} holds characters that no key has")
        check_proxies()
        import openai  # noqa: F401 it takes a second, which is no request's

        self._config, self._key = config, key
        self.model = config.model
        self.name = f"{config.model} at {config.url}"
        self._key_works = False
        self._client = PerLoop(self._open)

    def _open(self) -> "openai.AsyncOpenAI":
        import openai

        class Client(openai.DefaultAsyncHttpxClient):
            """Does not follow redirects, and bounds the bodies of errors, which `openai` reads whole."""

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

    async def complete(self, question: ChatRequest) -> Completion:
        import openai

        schema = {"name": "feedback", "strict": True, "schema": dict(question.schema)}
        try:
            async with self._client.get().chat.completions.with_streaming_response.create(
                model=self.model,
                messages=list(question.messages),  # type: ignore[arg-type]
                response_format={"type": "json_schema", "json_schema": schema} if question.schema else openai.omit,
                max_completion_tokens=question.max_output_tokens,
                temperature=question.temperature,
                seed=question.seed,
            ) as response:
                self._key_works = True
                body = await read_body(response.iter_bytes())
            said = read_completion(body, prompt="".join(message["content"] for message in question.messages))
        except openai.APIStatusError as error:
            raise self._refused(error) from None
        except openai.OpenAIError as error:
            cause = f": {error.__cause__}" if error.__cause__ and str(error.__cause__) else ""
            raise self._failed("connection", f"{error}{cause}") from None
        except ConnectionError as error:  # the client tries again no longer, once an answer has begun
            raise self._failed("connection", str(error), is_transient=True) from None
        except ValueError as error:
            raise self._failed("answer", str(error)) from None
        # Nobody reads a refusal but people. An answer stays as it is: a key may be a word like "any".
        return replace(said, text=self._words(said.text)) if said.finish_reason == "refusal" else said

    def _refused(self, error: "openai.APIStatusError") -> Exception:
        """What an HTTP status above 399 means for this request and for all others."""
        status = error.status_code
        words = self._words(f"HTTP {status}: {error.message}")
        if target := error.response.headers.get("location"):
            return UserError(
                f"llm.url={self._config.url} redirects to {self._words(target.partition('?')[0])}; no redirect is "
                "followed, because it would carry the prompts there; set llm.url to the right address"
            )
        if is_quota_exhausted(status, error.response.content):
            return RunStopped(f"the account of {self._config.key_env} has nothing left to spend: {words}")
        if status == 401 or (status == 403 and not self._key_works):  # some say 403 of an input that they do not like
            key = f"the key in the environment variable {self._config.key_env}"
            return UserError(f"llm.url={self._config.url} refuses {key}: {words}")
        if status == 404:
            return UserError(f"llm.url={self._config.url} does not know llm.model={self.model} or the path: {words}")
        return self._failed(f"HTTP {status}", words)

    def _failed(self, kind: str, words: str, *, is_transient: bool = False) -> ChatError:
        return ChatError(kind, f"{self.name}: {self._words(words)}", is_transient=is_transient)

    def _words(self, words: str) -> str:
        """In one printable line, without the key (servers like to repeat it), and only then cut."""
        for key in (self._key, self._key.replace("/", r"\/")):  # as some write it in JSON
            words = words.replace(key, "***")
        line = " ".join(mask_secrets(words).split())[:MAX_WORDS]
        return "".join(character if character.isprintable() else "?" for character in line)


def check_proxies() -> None:
    """Raise MissingLocally for a proxy that the HTTP library would refuse with a message that holds its password."""
    for scheme, url in getproxies().items():
        if scheme in ("http", "https", "all") and not PROXY.fullmatch(url):
            raise MissingLocally(f"the environment variable {scheme.upper()}_PROXY needs the form http://host:port")


async def read_body(chunks: AsyncIterator[bytes], limit: int = MAX_BODY_BYTES) -> bytes:
    """Return the first `limit` bytes and at most a chunk more. ConnectionError when the body ends before it should."""
    body = bytearray()
    try:
        async for chunk in chunks:
            body += chunk
            if len(body) > limit:
                break
    except Exception as error:  # whatever HTTP library openai brings along
        raise ConnectionError(f"the answer broke off: {type(error).__name__}: {error}") from error
    return bytes(body)


async def read_error(response: Any) -> Any:
    """Return an HTTP response with the start of the body, and without a retry where the quota is exhausted."""
    try:
        body = (await read_body(response.aiter_bytes(), MAX_ERROR_BYTES))[:MAX_ERROR_BYTES]
    except ConnectionError:
        body = b""  # the status is enough
    await response.aclose()
    headers = {name: text for name, text in response.headers.items() if not name.startswith("content-")}
    if is_quota_exhausted(response.status_code, body):
        headers["x-should-retry"] = "false"
    return type(response)(response.status_code, headers=headers, content=body, request=response.request)


def is_quota_exhausted(status: int, body: bytes) -> bool:
    """Return whether an error says that the account can pay for no request any more.

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
    """The first choice of a chat completion. ValueError for anything else: a proxy's web page, JSON that is cut off.

    The error shows the whole body: half a key, cut here, would be found by nobody.
    Tokens that the server does not report are estimated from `prompt` and the answer.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"an answer of more than {MAX_BODY_BYTES} bytes")
    try:
        read = _Body.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(f"no chat completion, {format_first_error(error)}: {body.decode(errors='replace')}") from None
    message, reason, usage = read.choices[0].message, read.choices[0].finish_reason, read.usage or _Usage()
    refused = reason == "content_filter" or message.refusal
    text = message.refusal or message.content or ""
    return Completion(
        text=text,
        finish_reason="refusal" if refused else "length" if reason == "length" else "stop",
        prompt_tokens=estimate_tokens(prompt) if usage.prompt_tokens is None else usage.prompt_tokens,
        output_tokens=estimate_tokens(text) if usage.completion_tokens is None else usage.completion_tokens,
    )
