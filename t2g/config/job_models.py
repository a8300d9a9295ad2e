"""The models that a job serves or trains, each with its config key and its engine. See `AnyJob.models`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from t2g.config.common import ModelConfig
from t2g.config.feedback import EngineConfig, SourceConfig


@dataclass(frozen=True, kw_only=True)
class SectionEngine:
    """An engine and the dotted key of its section."""

    section: str
    config: EngineConfig


@dataclass(frozen=True, kw_only=True)
class JobModel:
    """A model of a job."""

    key: str  # "model.policy"
    name: str  # folder or hub name
    revision: str | None = None
    chat: ModelConfig | None = None  # a policy has the options of its chat template
    engine: SectionEngine | None = None  # serves the model; None: ranks alone load it
    is_trained: bool = False


class PromptPreview(NamedTuple):
    """A prompt as a policy reads it."""

    model: ModelConfig
    token_ids: Sequence[int]
    label: str


def policy_model(
    model: ModelConfig, engine: SectionEngine | None, *, key: str = "model.policy", is_trained: bool = False
) -> JobModel:
    """Return a policy, which has a chat template."""
    return JobModel(
        key=key, name=model.policy, revision=model.revision, chat=model, engine=engine, is_trained=is_trained
    )  # fmt: skip


def feedback_model(section: str, source: SourceConfig) -> JobModel:
    """Return the model of a feedback source that our own engines serve."""
    engine = SectionEngine(section=f"{section}.engine", config=source.engine)
    if source.engine_model == "llm":
        llm = source.llm
        return JobModel(key=f"{section}.llm.model", name=str(llm.model), revision=llm.revision, engine=engine)
    name = str(source.reward_model)
    return JobModel(key=f"{section}.reward_model", name=name, revision=source.reward_revision, engine=engine)
