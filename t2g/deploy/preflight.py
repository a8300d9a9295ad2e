"""Find everything that would stop a job before its first step: at a start, for --dry-run and for jobs.deploy.

Reads the config's models (never their weights), imports its feedback function and reads the first record, or by
`read_inputs` all of them, on this machine. Asks the hub once for a model that is not here. Starts nothing.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from t2g.config import (
    AnyJob,
    CompareJob,
    DataConfig,
    EngineConfig,
    JobConfig,
    LLMConfig,
    LogConfig,
    ModelConfig,
    PolicyEvaluationJob,
    PolicyJob,
    ProcessConfig,
    ScoreJob,
    SFTJob,
)
from t2g.data.load import SUFFIXES, check_revision, load_records
from t2g.data.prompts import make_prompts
from t2g.deploy.memory import BYTES, GIB, find_shape, host_bytes
from t2g.errors import MissingLocally, UserError
from t2g.feedback.card import check_card, make_card
from t2g.feedback.sources.endpoint import EndpointChat
from t2g.feedback.sources.make import make_local_source
from t2g.runs.progress import log_duration
from t2g.sandbox import available
from t2g.tasks.base import Task, get_task
from t2g.text.positions import check_head_size, check_heads, check_positions
from t2g.text.tokenizer import check_chat_template, check_hub, check_model, load_tokenizer

ADAPTER_FILE = "adapter_config.json"
DATA_KEYS = ("data", "eval_data")
Job = TypeVar("Job", bound=AnyJob)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Sentences: what no machine can run, and what this one lacks; and the keys of what was found usable."""

    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    usable: set[str] = field(default_factory=set)  # "task", and keys of models and data

    def of(self, check: Callable[..., Result], *arguments: Any, **options: Any) -> Result | None:
        """What the check returns; None where it had to raise, and that is noted."""
        try:
            return check(*arguments, **options)
        except UserError as error:
            known = self.missing if isinstance(error, MissingLocally) else self.wrong
            known += [line for line in str(error).splitlines() if line not in [*self.wrong, *self.missing]]
            return None

    def refuse(self) -> None:
        """Raise UserError with all sentences, a line each, where there are any."""
        sentences = [*self.wrong, *self.missing]
        if len(sentences) > 1:
            raise UserError("\n- ".join([f"{len(sentences)} problems:", *sentences]))
        if sentences:
            raise UserError(sentences[0])


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that the config names: the key that does, and the engine that will hold it, by its section."""

    key: str
    name: str
    revision: str | None = None
    engine: tuple[str, EngineConfig] | None = None


def preflight(job: AnyJob, have: Mapping[str, float] | None = None) -> Findings:
    """have: what actors find on this machine, as Ray names it; None: they run on a cluster whose resources are unknown.

    What is yet to be made, a path with ${artifacts} or ${rewards} in it, is passed over.
    """
    found = Findings()
    if have is not None and (lacking := shortfall(job.roles(), have)):
        found.missing.append(f"this machine is too small: {lacking}")
    task = found.of(get_task, job.task) if isinstance(job, JobConfig) else None
    found.usable.update(["task"] if task else [])
    for model in models(job):
        if "${" not in model.name and found.of(_check_model, model):
            found.usable.add(model.key)
    for key in DATA_KEYS:
        data = getattr(job, key, None)
        if data is not None and "${" not in data.path and found.of(_check_data, key, data):
            found.usable.add(key)
    if isinstance(job, PolicyJob | SFTJob) and "model.policy" in found.usable:
        found.of(_check_memory, job)
    if isinstance(job, JobConfig) and task is not None:
        _check_sources(found, job, task)
    log = getattr(job, "log", LogConfig())
    if log.wandb_project is not None and find_spec("wandb") is None:
        found.missing.append(
            f"log.wandb_project={log.wandb_project!r} needs the package wandb, which is not installed: "
            "install the extra `wandb`, or leave the field out"
        )
    return found


def read_inputs(found: Findings, job: Job, read: Callable[[Job], Result]) -> Result | None:
    """Return what `read` reads for the job, None where inputs are wrong, missing or yet to be made.

    Without the policy's tokenizer the records are read all the same, so that all problems are reported at once.
    """
    inputs = {key for key in DATA_KEYS if getattr(job, key, None)}
    needed = {"task", *inputs, *(model.key for model in models(job) if model.key == "model.policy")}
    if needed <= found.usable:
        with log_duration("reading the data"):
            return found.of(read, job)
    for key in inputs & found.usable:
        records = found.of(load_records, getattr(job, key), key)
        if records and isinstance(job, PolicyJob) and "task" in found.usable:
            found.of(make_prompts, records, get_task(job.task), None, 0)
    return None


def models(job: AnyJob) -> Iterator[Model]:
    """All that the config names, each where it is loaded."""
    if model := getattr(job, "model", None):
        section = "rollout" if "rollout" in job.roles() else "engine"
        engine = getattr(job, section, None)
        yield _policy("model.policy", model, (section, engine) if engine else None)
    if isinstance(job, PolicyEvaluationJob):
        for name, model in job.served.items():
            if not (Path(model.policy) / ADAPTER_FILE).exists():  # merged into its base first
                section = "policies" if name in job.policies else "reflections"
                yield _policy(f"{section}.{name}.policy", model, ("rollout", job.rollout))
    if isinstance(job, CompareJob) and job.compare.reviser:
        yield Model(key="compare.reviser", name=job.compare.reviser)
    for section, feedback in job.feedback_sections.items():
        if feedback.own_engines:
            key, name, revision = "reward_model", feedback.reward_model, feedback.reward_revision
            if feedback.judge_model == "llm":
                key, name, revision = "llm.model", feedback.llm.model, feedback.llm.revision
            engine = f"{section}.engine", feedback.engine
            yield Model(key=f"{section}.{key}", name=str(name), revision=revision, engine=engine)


def _policy(key: str, model: ModelConfig, engine: tuple[str, EngineConfig] | None) -> Model:
    return Model(key=key, name=model.policy, revision=model.revision, engine=engine)


def servers(job: AnyJob) -> Iterator[LLMConfig]:
    """Models behind servers, which want a key."""
    if isinstance(job, PolicyEvaluationJob):
        yield from (*job.endpoints.values(), *job.judges.values())
    yield from (one.llm for one in job.feedback_sections.values() if one.judge_model == "llm" and one.llm.url)


def shortfall(roles: Mapping[str, ProcessConfig], resources: Mapping[str, float]) -> str | None:
    """One sentence about the first resource of which the roles together need more than there is, None if they fit.

    resources: as Ray names them, memory in bytes. 2 rollout workers of 1.5 GiB and one learner of 3 GiB on 4 GiB:
    "6 GiB of memory needed (rollout 2 x 1.5, learner 1 x 3), 4 free; lower workers or memory_gib"
    """
    have = {"cpus": resources.get("CPU", 0), "gpus": resources.get("GPU", 0)}
    have["memory_gib"] = resources.get("memory", 0) / GIB
    for name, unit in (("cpus", "CPUs"), ("gpus", "GPUs"), ("memory_gib", "GiB of memory")):
        need = sum(role.num_processes * getattr(role, name) for role in roles.values())
        if need > have[name] + 1e-6:
            parts = ", ".join(f"{section} {r.num_processes} x {getattr(r, name):g}" for section, r in roles.items())
            return f"{need:g} {unit} needed ({parts}), {have[name]:.3g} free; lower workers or {name}"
    return None


def _check_model(model: Model) -> bool:
    """True; UserError for what no engine or rank can load."""
    check_model(model.key, model.name, model.revision)
    source = model.name, model.revision
    check_chat_template(load_tokenizer(*source))
    if model.engine is not None:
        section, engine = model.engine
        check_positions(*source, f"{section}.max_model_len", engine.max_model_len)
        check_heads(*source, f"{section}.gpus", engine.tensor_parallel)
        if not engine.gpus:
            check_head_size(*source, model.key)
            shape = find_shape(*source)
            need = BYTES[engine.dtype] * shape.numel / GIB if shape else 0
            if need > engine.memory_gib:
                sizes = f"{section}.memory_gib is {engine.memory_gib:g}, and the weights of {model.name} alone have"
                raise UserError(f"{sizes} {need:.1f} GiB")
    return True


def _check_data(key: str, data: DataConfig) -> bool:
    """The first record can be read, and has the columns. Of what is on the hub only the name is looked at."""
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    path = Path(data.path)
    if path.is_file():
        load_records(data.model_copy(update={"limit": 1}), key)
    elif not path.exists():
        if path.suffix in SUFFIXES or path.is_absolute():
            raise MissingLocally(f"{key}.path={path}: there is no such file")
        check_revision(key, data)
        read = Path(os.environ.get("HF_DATASETS_CACHE", f"{HF_HOME}/datasets"), data.path.replace("/", "___"))
        fetched = Path(HF_HUB_CACHE, f"datasets--{data.path.replace('/', '--')}")
        check_hub(f"{key}.path", data.path, data.revision, "dataset", lambda: read.is_dir() or fetched.is_dir())
    return True


def _check_memory(job: PolicyJob | SFTJob) -> None:
    """A rank has room on the host for the models that it loads, and a prompt with a critique for the teacher's pass."""
    source = job.model.policy, job.model.revision
    if isinstance(job, PolicyJob) and job.objective.teacher is not None:
        window = "rollout.max_model_len and feedback.engine.max_model_len together"
        check_positions(*source, window, job.revision_window)
    shape = find_shape(*source)
    if shape is None:
        return
    section, ranks = ("sft", job.sft) if isinstance(job, SFTJob) else ("learner", job.learner)
    need: float = BYTES[ranks.dtype] * shape.numel
    if isinstance(job, PolicyJob):
        need = host_bytes(shape, job.learner, job.objective, sharing=job.cluster.gpu_sharing)
    if need / GIB > ranks.memory_gib:
        raise UserError(
            f"{section}.memory_gib is {ranks.memory_gib:g}: a rank that loads its models needs {need / GIB:.1f}"
        )


def _check_sources(found: Findings, job: JobConfig, task: Task) -> None:
    """Whoever judges is there: a function that takes what it is given, a key, a file, a card that fits, a sandbox."""
    for section, feedback in job.feedback_sections.items():
        if feedback.source == "human" and not Path(str(feedback.human_file)).is_file():
            found.missing.append(f"{section}.human_file={feedback.human_file}: there is no such file")
        elif feedback.source not in ("llm", "reward_model") and not feedback.own_engines:
            found.of(make_local_source, feedback, task)
        is_known = f"{section}.reward_model" in found.usable
        if is_known and not isinstance(job, ScoreJob):  # which takes what the card says
            found.of(check_card, Path(str(feedback.reward_model)), make_card(task, feedback.style))
    for server in servers(job):
        found.of(EndpointChat, server)
    if isinstance(job, PolicyEvaluationJob) and job.task == "code" and (lack := available(job.sandbox.require)):
        found.missing.append(lack)
