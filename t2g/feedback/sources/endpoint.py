"""A chat model behind an OpenAI-compatible server.

`openai` retries transient errors (429, 5xx, no connection) after the server's Retry-After, else with exponential
backoff, also those that a server sends with status 200. It retries neither an exhausted quota nor a Retry-After above
two minutes. `t2g.feedback.sources.llm` sets the deadline of all attempts. A field that a server refuses is replaced or
left out where that is possible.

Key and prompt are sent to `llm.url` only: redirects are not followed. No other credential is sent: the library's
headers from the environment are removed. Secrets in texts of servers and libraries are masked.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from t2g.config import LLMConfig
from t2g.config.secrets import MIN_SECRET_CHARS, mask_secrets
from t2g.errors import MissingLocally, RunStopped, UserError
from t2g.feedback.sources.chat_client import Chat, ChatCompletion, ChatError, ChatRequest, PerLoop
from t2g.feedback.sources.completions import (
    MAX_BODY_BYTES,
    extract_error,
    find_error_status,
    find_reason,
    is_quota_exhausted,
    read_completion,
)

if TYPE_CHECKING:
    import openai

logger = logging.getLogger(__name__)

MAX_ERROR_BYTES = 64 * 2**10  # bytes of the body of an error
PROXY = re.compile(r"(https?://)?([^/\s@]*@)?([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?/?")
MAX_MESSAGE_CHARS = 2000  # length of an error's text
FALLBACKS = {  # fields that some servers refuse, by the error that names them; see `EndpointChat._make_fields`
    "max_completion_tokens": re.compile(r"max_completion_tokens"),
    "response_format": re.compile(r"response_format|json_schema"),
    "seed": re.compile(r"\bseed\b"),
    # Models that reason accept their default alone. A number out of range stays an error.
    "temperature": re.compile(
        r"(?=.*\btemperature\b)(?=.*(unsupported|not support|deprecated|extra_forbidden))", re.DOTALL | re.IGNORECASE
    ),
}
# The library marks a request with its own headers, by which it selects the form of what it returns.
SENT_HEADERS = re.compile(
    r"accept(-encoding)?|connection|content-(length|type)|host|user-agent|x-stainless-[\w-]+", re.IGNORECASE
)
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
        if len(key) >= MIN_SECRET_CHARS and is_sent_unencrypted(config.url):  # a server without keys gets a short word
            logger.warning(
                "llm.url=%s sends key and prompts unencrypted to another machine; https protects them", config.url
            )
        import openai  # noqa: F401 the import takes a second, which must not count towards a request

        self._config = config
        self._key = key
        self.model = config.model
        self.name = f"{config.model} at {config.url}"
        self._key_works = False
        self._fallbacks = frozenset[str]()  # those of FALLBACKS that this server needs
        self._client = PerLoop(self._open)

    def _open(self) -> "openai.AsyncOpenAI":
        import httpx2
        import openai

        key = self._key
        limit_s = self._config.request_timeout_s

        class BoundedHttpClient(openai.DefaultAsyncHttpxClient):
            """Bounds bodies in size, and whole requests in time: `openai` bounds the time of each read alone."""

            async def send(self, request: Any, **options: Any) -> Any:
                started = time.monotonic()
                limit_headers(request.headers, key)
                try:
                    async with asyncio.timeout(limit_s):
                        options["stream"] = True
                        response = await super().send(request, **options)
                except TimeoutError:
                    raise httpx2.ReadTimeout(f"no answer within llm.request_timeout_s={limit_s:g}") from None
                elapsed_s = time.monotonic() - started
                return await read_response(response, limit_s=limit_s - elapsed_s)

        return openai.AsyncOpenAI(
            base_url=self._config.url,
            api_key=self._key,
            timeout=self._config.request_timeout_s,
            max_retries=MAX_RETRIES,
            http_client=BoundedHttpClient(follow_redirects=False),
        )

    async def complete(self, request: ChatRequest) -> ChatCompletion:
        import openai

        fallbacks = self._fallbacks
        while True:
            try:
                response = await self._send(request, fallbacks)
                break
            except openai.APIStatusError as error:
                further = find_fallbacks(error.status_code, error.response.content) - fallbacks
                if not further:
                    raise self._convert_status_error(error) from None
                fallbacks |= further
            except openai.OpenAIError as error:
                cause = str(error.__cause__ or "")
                message = f"{error}: {cause}" if cause else str(error)
                raise self._make_error("connection", message) from None
        self._key_works = True
        self._remember(fallbacks)
        if failure := response.extensions.get("failure"):  # the client does not retry once an answer has begun
            raise self._make_error("connection", failure, is_transient=True)
        try:
            prompt = "".join(message["content"] for message in request.messages)
            completion = read_completion(response.content, prompt=prompt)
        except ValueError as error:
            raise self._make_error("answer", str(error)) from None
        if completion.finish_reason == "refusal":  # goes to logs
            return replace(completion, text=self._mask(completion.text))
        if len(self._key) >= MIN_SECRET_CHARS:  # a shorter one may be a common word, like "any", and occur in an answer
            return replace(completion, text=self._mask_key(completion.text))
        return completion

    async def _send(self, request: ChatRequest, fallbacks: frozenset[str]) -> Any:
        """Return the HTTP response, see `read_response`. Raises errors of `openai`."""
        client = self._client.get()
        fields = self._make_fields(request, fallbacks)
        raw = await client.chat.completions.with_raw_response.create(
            model=self.model,
            messages=list(request.messages),  # type: ignore[arg-type]
            extra_body=dict(self._config.request.extra),
            **fields,
        )
        return raw.http_response

    def _make_fields(self, request: ChatRequest, fallbacks: frozenset[str]) -> dict[str, Any]:
        """Return the optional fields of a request, with the fallbacks that this server needs."""
        fields: dict[str, Any] = {
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        if request.schema:
            schema = {"name": "feedback", "strict": True, "schema": dict(request.schema)}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        for name in self._config.request.omit:
            fields.pop(name, None)
        if "max_completion_tokens" in fallbacks and "max_completion_tokens" in fields:
            fields["max_tokens"] = fields.pop("max_completion_tokens")
        if "response_format" in fallbacks and "response_format" in fields:
            fields["response_format"] = {"type": "json_object"}  # the prompt describes the object, too
        for name in fallbacks & {"seed", "temperature"}:
            fields.pop(name, None)
        return fields

    def _remember(self, fallbacks: frozenset[str]) -> None:
        """Use the fallbacks, with which a request succeeded, for all requests."""
        if fallbacks <= self._fallbacks:
            return
        self._fallbacks |= fallbacks
        names = ", ".join(sorted(fallbacks))
        note = ", and the server's own temperature" if "temperature" in fallbacks else ""
        logger.warning("%s refuses %s as OpenAI defines it; requests use what it accepts%s", self.name, names, note)

    def _convert_status_error(self, error: "openai.APIStatusError") -> Exception:
        """Return the exception of an HTTP status above 399: ChatError, or one for all requests."""
        status = error.status_code
        label = error.response.extensions.get("label", f"HTTP {status}")
        reason = find_reason(error.response.content) or error.message
        message = self._mask(f"{label}: {reason}")
        if target := error.response.headers.get("location"):
            address = self._mask(target.partition("?")[0])
            return UserError(
                f"llm.url={self._config.url} redirects to {address}; redirects are not "
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
        message = mask_secrets(self._mask_key(message))
        line = " ".join(message.split())[:MAX_MESSAGE_CHARS]
        return "".join(character if character.isprintable() else "?" for character in line)

    def _mask_key(self, text: str) -> str:
        for key in (self._key, self._key.replace("/", r"\/")):  # the second form occurs in JSON
            text = text.replace(key, "***")
        return text


def limit_headers(headers: MutableMapping[str, str], key: str) -> None:
    """Remove the headers that a request does not need, and authorize it with the key.

    `openai` adds OPENAI_CUSTOM_HEADERS, OPENAI_ORG_ID and OPENAI_PROJECT_ID of the environment, which are for another
    server: with them a judge would get its credentials.
    """
    for name in list(headers):
        if not SENT_HEADERS.fullmatch(name):
            del headers[name]
    headers["authorization"] = f"Bearer {key}"


def is_sent_unencrypted(url: str) -> bool:
    """Return whether requests to a URL leave this machine unencrypted.

    >>> is_sent_unencrypted("http://judge.example/v1"), is_sent_unencrypted("http://127.0.0.1:8000/v1")
    (True, False)
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "http" or host == "localhost":
        return False
    try:
        return not ip_address(host).is_loopback
    except ValueError:  # a name
        return True


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
    except Exception as error:  # the HTTP library that openai uses has errors of its own
        raise ConnectionError(f"the answer broke off: {type(error).__name__}: {error}") from error
    return bytes(body)


async def read_response(response: Any, *, limit_s: float) -> Any:
    """Return an HTTP response with its body, or the start of a longer one, read within `limit_s`.

    An error that was sent with status 200 has the status that it names. An error is marked against a retry if the quota
    is exhausted. A body that broke off is empty, with the reason in `extensions`: the server may have billed it.
    """
    max_bytes = MAX_BODY_BYTES if response.is_success else MAX_ERROR_BYTES
    extensions: dict[str, str] = {}
    try:
        async with asyncio.timeout(limit_s):
            body = await read_body(response.aiter_bytes(), max_bytes)
    except (ConnectionError, TimeoutError) as error:
        body = b""
        extensions["failure"] = str(error) or "the answer did not end within llm.request_timeout_s"
    await response.aclose()
    status = response.status_code
    if response.is_success and (error := extract_error(body)):
        error_status = find_error_status(error)
        extensions["label"] = f"HTTP {status} with error {error_status}"
        status = error_status
        body = error
    if status >= 400:
        body = body[:MAX_ERROR_BYTES]
    headers = dict(response.headers.items())
    for name in [name for name in headers if name.startswith("content-")]:
        del headers[name]
    if is_quota_exhausted(status, body):
        headers["x-should-retry"] = "false"
    return type(response)(status, headers=headers, content=body, request=response.request, extensions=extensions)


def find_fallbacks(status: int, body: bytes) -> frozenset[str]:
    """Return the fields of a request that an error names, of those that have a fallback.

    >>> find_fallbacks(400, b'{"error": {"message": "This response_format type is unavailable now"}}')
    frozenset({'response_format'})
    """
    if status not in (400, 422):
        return frozenset()
    text = body.decode(errors="replace")
    return frozenset(field for field, pattern in FALLBACKS.items() if pattern.search(text))
