"""Find everything that would stop a job before its first step: at its start, for --dry-run and for jobs.deploy.

The checks read the config's models, import its feedback function and read the first record;
`read_inputs` reads all records. The hub is queried once for a model that is not on this machine. Nothing is started.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from t2g.config import (
    AnyJob,
    DataConfig,
    EngineConfig,
    PolicyJob,
    ProcessConfig,
)
from t2g.config.artifacts import find_artifacts, is_made_later
from t2g.config.job_models import JobModel
from t2g.data.load import check_path, load_records
from t2g.data.prompts import make_prompts
from t2g.errors import MissingLocally, UserError
from t2g.feedback.card import check_card, make_card
from t2g.feedback.outcome_rewards import OutcomeRewards
from t2g.feedback.sources.endpoint import EndpointChat
from t2g.feedback.sources.human import human_paths
from t2g.feedback.sources.make import make_local_source
from t2g.resources.job_memory import JobRanks, find_ranks
from t2g.resources.memory import BYTES, GIB
from t2g.resources.model_files import check_model_files
from t2g.resources.model_shape import find_shape
from t2g.resources.packages import find_absent_scorer, find_absent_trackers, find_mirror_problem
from t2g.resources.weights import check_finite_weights
from t2g.runs.progress import log_duration
from t2g.sandbox import find_refusal
from t2g.tasks.base import Task, get_task
from t2g.text.model_limits import (
    check_full_attention,
    check_head_size,
    check_heads,
    check_positions,
    check_sliding_window,
    check_vision,
)
from t2g.text.policy_chat import set_template_defaults
from t2g.text.tokenizer import check_chat_template, check_hub, check_model, load_tokenizer

RANK_LEVERS = "tokens_per_microbatch (or set gradient_checkpointing=true)"  # keys that lower the memory of a rank
BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16")  # CPU instructions that multiply bfloat16
Job = TypeVar("Job", bound=AnyJob)
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The problems of a job, a sentence each, and its usable inputs."""

    wrong: list[str] = field(default_factory=list)  # problems on any machine
    missing: list[str] = field(default_factory=list)  # files, packages and resources that this machine lacks
    usable: set[str] = field(default_factory=set)  # "task", and keys of models and data

    def collect(self, check: Callable[..., Result], *arguments: Any, **options: Any) -> Result | None:
        """Return the result of a check, or None if it raises a UserError, whose lines are added to the problems."""
        try:
            return check(*arguments, **options)
        except UserError as error:
            problems = self.missing if isinstance(error, MissingLocally) else self.wrong
            known = [*self.wrong, *self.missing]
            problems += [line for line in str(error).splitlines() if line not in known]
            return None

    def refuse(self) -> None:
        """Raise if there are problems.

        Raises:
            UserError: All problems, a line each.
        """
        sentences = [*self.wrong, *self.missing]
        if len(sentences) > 1:
            raise UserError("\n- ".join([f"{len(sentences)} problems:", *sentences]))
        if sentences:
            raise UserError(sentences[0])


def preflight(job: AnyJob, resources: Mapping[str, float] | None = None) -> Findings:
    """Check a job. Artifacts, and ${rewards}, may be made later and are not checked.

    Args:
        resources: The resources of this machine, with Ray's names; None for a cluster of unknown resources.
    """
    findings = Findings()
    artifacts = find_artifacts(job)
    if resources is not None:
        if lack := shortfall(job.roles(), resources):
            findings.missing.append(f"this machine is too small: {lack}")
        _warn_of_emulated_dtypes(job)
    task = None if job.task_name is None else findings.collect(get_task, job.task_name)
    findings.usable.update(["task"] if task else [])
    for model in job.models():
        if not is_made_later(model.name, artifacts) and findings.collect(_check_model, model):
            findings.usable.add(model.key)
    for key, data in job.data_sections.items():
        if any(is_made_later(path, artifacts) for path in data.paths):
            continue
        if findings.collect(_check_data, key, data):
            findings.usable.add(key)
    ranks = find_ranks(job)
    if ranks is not None and "model.policy" in findings.usable:
        if job.teacher_window is not None:
            findings.collect(_check_teacher_window, ranks, job.teacher_window)
        if isinstance(job, PolicyJob) and job.learner.share_prompts:
            findings.collect(check_full_attention, ranks.model.policy, ranks.model.revision, job.rollout.max_model_len)
        findings.collect(_check_memory, ranks)
    if task is not None:
        _check_sources(findings, job, task)
    if problem := find_mirror_problem(job):
        findings.missing.append(problem)
    findings.missing.extend(find_absent_trackers(job))
    findings.missing.extend(find_absent_scorer(job))
    return findings


def _warn_of_emulated_dtypes(job: AnyJob) -> None:
    slow = emulated_dtypes(job.roles(), _cpu_features())
    if slow:
        logger.warning(
            "%s: this CPU has no instructions for bfloat16 and multiplies it at a sixth of the speed of float32; "
            "set float32", ", ".join(f"{key}=bfloat16" for key in slow),
        )  # fmt: skip


def read_inputs(findings: Findings, job: Job, read: Callable[[Job], Result]) -> Result | None:
    """Return what `read` reads for the job, or None if inputs are wrong, missing or created later.

    Without the policy's tokenizer the records are read nevertheless, so that all problems are reported at once.
    """
    inputs = job.data_sections.keys()
    needed = {"task", *inputs}
    if any(model.key == "model.policy" for model in job.models()):
        needed.add("model.policy")
    if needed <= findings.usable:
        with log_duration("reading the data"):
            return findings.collect(read, job)
    for key in inputs & findings.usable:
        records = findings.collect(load_records, job.data_sections[key], key)
        if records and isinstance(job, PolicyJob) and "task" in findings.usable:
            task = get_task(job.task)
            prompts = findings.collect(make_prompts, records, task, None, 0)
            if prompts and key == "data":
                findings.collect(OutcomeRewards, job, task, prompts)
    return None


def shortfall(roles: Mapping[str, ProcessConfig], resources: Mapping[str, float]) -> str | None:
    """Return a sentence about the resources of which the roles need more than is free, or None if they fit.

    2 rollout workers of 1.5 GiB and one learner of 3 GiB on 4 GiB:
    "6 GiB of memory needed (rollout 2 x 1.5, learner 1 x 3), 4 free; lower workers, tokens_per_microbatch (or set
    gradient_checkpointing=true) or memory_gib"

    Args:
        resources: Free resources, with Ray's names; memory in bytes.
    """
    have = {"cpus": resources.get("CPU", 0), "gpus": resources.get("GPU", 0)}
    have["memory_gib"] = resources.get("memory", 0) / GIB
    has_ranks = any(hasattr(role, "tokens_per_microbatch") for role in roles.values())
    shortages: list[str] = []
    for name, unit in (("gpus", "GPUs"), ("cpus", "CPUs"), ("memory_gib", "GiB of memory")):
        need = 0.0
        terms: list[str] = []
        for section, role in roles.items():
            amount = getattr(role, name)
            need += role.num_processes * amount
            terms.append(f"{section} {role.num_processes} x {amount:g}")
        if need > have[name] + 1e-6:
            levers = "workers"
            if name == "memory_gib" and has_ranks:
                levers += f", {RANK_LEVERS}"
            unit = unit.removesuffix("s") if need == 1 else unit
            needed = f"{need:g} {unit} needed ({', '.join(terms)})"
            shortages.append(f"{needed}, {have[name]:.3g} free; lower {levers} or {name}")
    return ". Also ".join(shortages) or None


def _cpu_features() -> Mapping[str, object]:
    import torch  # heavy

    return torch.cpu.get_capabilities()


def emulated_dtypes(roles: Mapping[str, ProcessConfig], features: Mapping[str, object]) -> list[str]:
    """Return the keys of the dtypes that a CPU with these features emulates.

    Args:
        features: Name -> whether the CPU has it, of `torch.cpu.get_capabilities`.
    """
    if any(features.get(feature) for feature in BFLOAT16_FEATURES):
        return []
    keys: list[str] = []
    for name, role in roles.items():
        if not role.gpus and getattr(role, "dtype", "") == "bfloat16":
            keys.append(f"{name}.dtype")
    return keys


def matches_selector(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether a node with `labels` may hold a worker with `selector`; every node may if it is empty.

    Values are compared for equality. Ray's operators (!value, in(...), !in(...)) count as satisfied, so that they never
    cause a wrong warning.
    """
    for key, value in selector.items():
        is_operator = value.startswith(("!", "in("))
        if not is_operator and labels.get(key) != value:
            return False
    return True


def _check_model(model: JobModel) -> bool:
    """Return True.

    Raises:
        UserError: An engine or rank cannot load the model.
    """
    check_model(model.key, model.name, model.revision)
    check_model_files(model.key, model.name, is_trained=model.is_trained)
    source = (model.name, model.revision)
    tokenizer = load_tokenizer(*source)
    if model.chat is not None:
        set_template_defaults(tokenizer, model.chat)
    check_chat_template(tokenizer)
    check_vision(*source, model.key, is_trained=model.is_trained, has_engine=model.engine is not None)
    check_finite_weights(model.key, model.name)
    if model.engine is not None:
        section = model.engine.section
        engine = model.engine.config
        check_positions(*source, f"{section}.max_model_len", engine.max_model_len)
        check_heads(*source, f"{section}.gpus", engine.tensor_parallel)
        if model.is_trained:
            check_sliding_window(*source, f"{section}.max_model_len", engine.max_model_len)
        if not engine.gpus:
            check_head_size(*source, model.key)
            _check_weights_fit(model, section, engine)
    return True


def _check_weights_fit(model: JobModel, section: str, engine: EngineConfig) -> None:
    """Check that the weights of a model fit in the host memory of an engine on a CPU."""
    shape = find_shape(model.name, model.revision)
    if shape is None:
        return
    need = BYTES[engine.dtype] * shape.numel / GIB
    if need > engine.memory_gib:
        raise UserError(
            f"{section}.memory_gib is {engine.memory_gib:g}, and the weights of {model.name} alone have {need:.1f} GiB"
        )


def _check_data(key: str, data: DataConfig) -> bool:
    """Check that the first record can be read. Only the name of data on the hub is checked."""
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    for name in reversed(data.paths):
        check_path(key, name, data)
    if Path(name).is_file():  # the first one
        # A row lacks the columns that are empty in it: `read_inputs` checks the columns in all records.
        load_records(data.model_copy(update={"limit": 1, "columns": {}}), key)
    elif not Path(name).exists():
        prepared_folder = os.environ.get("HF_DATASETS_CACHE", f"{HF_HOME}/datasets")
        prepared = Path(prepared_folder, name.replace("/", "___"))
        fetched = Path(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")
        check_hub(f"{key}.path", name, data.revision, "dataset", lambda: prepared.is_dir() or fetched.is_dir())
    return True


def _check_teacher_window(ranks: JobRanks, window: int) -> None:
    """Check that a prompt with a critique fits in the teacher's context."""
    keys = "rollout.max_model_len and feedback.engine.max_model_len together"
    check_positions(ranks.model.policy, ranks.model.revision, keys, window)


def _check_memory(ranks: JobRanks) -> None:
    """Check that a rank's models fit in host memory."""
    shape = find_shape(ranks.model.policy, ranks.model.revision)
    if shape is None:
        return
    need_gib = ranks.count_load_bytes(shape) / GIB
    memory_gib = ranks.options.memory_gib
    if need_gib > memory_gib:
        raise UserError(
            f"{ranks.section}.memory_gib is {memory_gib:g}: a rank that loads its models needs {need_gib:.1f}"
        )


def _check_sources(findings: Findings, job: AnyJob, task: Task) -> None:
    """Check the feedback sources: signature of a function, API key, file of annotations, model card, sandbox."""
    for section, feedback in job.feedback_sections.items():
        absent = [path for path in human_paths(feedback) if not path.is_file()]
        if feedback.source == "human" and absent:
            findings.missing.append(f"{section}.human_file={absent[0]}: there is no such file")
        elif feedback.source not in ("llm", "reward_model", *(["human"] if feedback.engine_model else [])):
            findings.collect(make_local_source, feedback, task, section=section)
        is_usable = f"{section}.reward_model" in findings.usable
        if is_usable and not job.takes_card_settings:
            findings.collect(check_card, Path(str(feedback.reward_model)), make_card(task, feedback.style))
    for server in job.servers():
        findings.collect(EndpointChat, server)
    sandbox = job.measuring_sandbox()
    refusal = "" if sandbox is None else find_refusal(sandbox.require)
    if refusal and refusal not in findings.missing:  # a feedback program has reported the same
        findings.missing.append(refusal)
