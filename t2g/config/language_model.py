"""The section of a language model that judges, behind a server or on own engines."""

import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from t2g.config.common import Section
from t2g.config.field_annotations import PathOrName, ResumeMutable

# Fields into which users paste API keys by mistake: the pattern and the description of a valid value.
LLM_FORMS = {
    "url": (
        r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[^\s?#]*)?",
        "the form https://host/path, without a user, a password or a query",
    ),
    "model": (r"(?![A-Za-z0-9]{32,}$).+", "the name of a model"),
    "key_env": (r"[A-Z_][A-Z0-9_]{0,99}", "the name of an environment variable, in capitals"),
}


class ChatFieldsConfig(Section):
    """Fields of the requests to a server that differs from OpenAI's."""

    omit: list[Literal["max_completion_tokens", "response_format", "seed", "temperature"]] = Field(
        [], description="fields that are not sent"
    )
    extra: dict[str, Any] = Field({}, description="further fields, such as {reasoning_effort: low}")

    @field_validator("extra")
    @classmethod
    def check_extra(cls, extra: dict[str, Any]) -> dict[str, Any]:
        """Refuse fields that the client itself sets."""
        if client_fields := sorted({"messages", "model", "n", "stream"} & extra.keys()):
            raise ValueError(f"llm.request.extra holds {', '.join(client_fields)}, which t2g sets itself: remove it")
        return extra


class LLMConfig(Section):
    """A language model as annotator: behind an OpenAI-compatible server, or on own vLLM engines."""

    url: ResumeMutable[str | None] = Field(
        None, description="base URL of an OpenAI-compatible server, without a key; none: own engines"
    )
    model: PathOrName[str | None] = Field(
        None, description="model name at the server; with own engines a folder or hub name"
    )
    revision: str | None = Field(None, description="commit of a hub model that own engines serve")
    key_env: ResumeMutable[str] = Field("OPENAI_API_KEY", description="environment variable that holds the key")
    concurrency: ResumeMutable[int] = Field(8, ge=1, description="most open requests")
    requests_per_minute: ResumeMutable[float | None] = Field(
        None, gt=0, description="rate limit; none: only `concurrency` limits"
    )
    request_timeout_s: ResumeMutable[float] = Field(
        120, gt=0, description="deadline of one whole request, which is then retried"
    )
    request: ChatFieldsConfig = ChatFieldsConfig()
    max_tries: int = Field(
        3, ge=1, description="most requests for one answer; a retry contains the error of the previous answer"
    )
    num_annotators: int = Field(1, ge=1, description="independent answers; a label needs the majority")
    temperature: float = Field(0.0, ge=0, description="above 0 for several annotators, whose answers are equal at 0")
    max_output_tokens: int = Field(2048, ge=16, description="limit of one answer, reasoning included")
    max_total_tokens: ResumeMutable[int | None] = Field(
        None,
        ge=1,
        description="token budget of one annotation run; a run whose estimate without retries is above it is refused "
        "before the first request",
    )

    @field_validator("url", "model", "key_env")
    @classmethod
    def check_no_secret(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse a value that may contain a key, without printing it: config.yaml would keep it."""
        pattern, form = LLM_FORMS[str(info.field_name)]
        if value is not None and not re.fullmatch(pattern, value):
            where = "the key itself belongs in the environment variable that llm.key_env names"
            raise ValueError(f"llm.{info.field_name} needs {form}; {where}")
        return value

    @model_validator(mode="after")
    def check_request_is_sent(self) -> "LLMConfig":
        if self.url is None and self.request != ChatFieldsConfig():
            raise ValueError(
                "llm.request is for the server of llm.url, and llm.url is not set: remove it, or set llm.url"
            )
        return self

    @model_validator(mode="after")
    def check_annotators_differ(self) -> "LLMConfig":
        if self.num_annotators > 1 and self.temperature == 0:
            raise ValueError(
                f"llm.num_annotators={self.num_annotators} with llm.temperature=0 returns equal answers; set a "
                "temperature, such as 0.7"
            )
        return self
