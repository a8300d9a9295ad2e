"""Schema of jobs.serve: the policy, its engine, the address, and the command that uses it."""

import shlex
from collections.abc import Iterator

from pydantic import Field, field_validator

from t2g.config.base_jobs import AnyJob
from t2g.config.common import ModelConfig, RunConfig, Section
from t2g.config.feedback import EngineConfig
from t2g.config.field_annotations import ResumeMutable
from t2g.config.job_models import JobModel, SectionEngine, policy_model


class ServeConfig(Section):
    host: str = Field("127.0.0.1", description="address that the server listens on; requests need no key")
    port: int | None = Field(None, ge=1, le=65535, description="none: a free one")
    name: str = Field("policy", min_length=1, description="name of the model in requests")
    command: str | None = Field(
        None,
        description="command to run when the server is ready, with {url}, {model} and {tokenizer} in it; the server "
        "ends with the command and its exit code. none: the server runs until it is stopped",
    )

    @field_validator("command")
    @classmethod
    def check_command(cls, command: str | None) -> str | None:
        if command is None:
            return None
        try:
            arguments = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"serve.command={command!r} is no command of a shell: {error}") from None
        if not arguments:
            raise ValueError("serve.command is blank; leave it out, and the server runs until it is stopped")
        return command


class ServeJob(AnyJob):
    """jobs.serve: a policy behind vLLM's OpenAI-compatible server."""

    run: RunConfig = RunConfig(name="serve")
    model: ModelConfig
    engine: ResumeMutable[EngineConfig] = EngineConfig()
    serve: ResumeMutable[ServeConfig] = ServeConfig()

    def policy_models(self) -> Iterator[JobModel]:
        engine = SectionEngine(section="engine", config=self.engine)
        yield policy_model(self.model, engine)

    def describe_work(self) -> list[str]:
        serving = f"{self.serve.name}: {self.model.policy}, on {self.serve.host}"
        return [serving, f"command: {self.serve.command or 'nothing'}"]
