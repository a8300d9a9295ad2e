"""The data of a run that trains a policy, read and checked before any process is started."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from actors.learner.lora import check_adapters
from actors.vllm_compat.tool_parsers import load_tool_parser
from t2g.config import PolicyJob
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.environments.call_readers import ReadCalls, make_call_reader
from t2g.environments.converse import make_encoder
from t2g.environments.environment import Environment
from t2g.errors import UserError
from t2g.feedback.outcome_rewards import OutcomeRewards
from t2g.loop.resampling import check_further_prompts
from t2g.loop.steps import check_truncation_penalty
from t2g.tasks.base import Task, get_task
from t2g.tasks.references import check_references
from t2g.text.policy_chat import load_policy_tokenizer, set_tools
from t2g.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PolicyData:
    """The inputs of a run, read before any process is started, so that bad input is refused within seconds."""

    task: Task
    tokenizer: Any
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    environment: Environment | None = None
    read_calls: ReadCalls | None = None  # reads the calls of the environment's tools; None: it has none

    @property
    def trainer_inputs(self) -> dict[str, Any]:
        """Return the fields that a trainer takes."""
        conversation_fields = ("environment", "read_calls")
        return {name: value for name, value in vars(self).items() if name not in conversation_fields}


def read_data(config: PolicyJob, methods: Sequence[PolicyJob] = ()) -> PolicyData:
    """Return the task, the tokenizer, the prompts and the held-out prompts.

    Args:
        methods: Runs that train on the same data with objectives of their own.

    Raises:
        UserError: The data, the tokenizer or the task cannot be used.
    """
    learner = config.learner
    if learner.lora is not None:
        uses_cpu_engines = learner.sync_adapters and not config.rollout.gpus
        check_adapters(learner.lora, config.model, cpu_engines=uses_cpu_engines)
    task = get_task(config.task)
    tokenizer = load_policy_tokenizer(config.model)
    environment = Environment(config, task) if config.environment else None
    read_calls = prepare_tools(config, environment, tokenizer) if environment else None
    jobs = (config, *methods)
    for job in jobs:
        check_spans(job, has_tools=read_calls is not None)
    room = config.rollout.max_prompt_tokens
    records = load_records(config.data)
    prompts = make_prompts(records, task, tokenizer, room, too_long=config.data.too_long)

    for job in jobs:
        OutcomeRewards(job, task, prompts)  # checks them
        warn_of_optional_criteria(job)
    penalty = max(job.objective.truncation_penalty for job in jobs)
    check_truncation_penalty(tokenizer, prompts, config.model, penalty)
    for job in jobs:
        check_further_prompts(job, len(prompts))
    prompts_per_step = config.rollout.prompts_per_step
    if len(prompts) < prompts_per_step:
        logger.warning(
            "data.path has only %d prompts, and rollout.prompts_per_step=%d: they get more samples in each step",
            len(prompts), prompts_per_step,
        )  # fmt: skip

    eval_prompts: list[Prompt] = []
    if config.eval_data is not None:
        eval_records = load_records(config.eval_data, "eval_data")[: config.eval.num_prompts]
        too_long = config.eval_data.too_long
        eval_prompts = make_prompts(eval_records, task, tokenizer, room, too_long=too_long, key="eval_data")
        check_measures(eval_prompts, task)
    return PolicyData(
        task=task,
        tokenizer=tokenizer,
        prompts=prompts,
        eval_prompts=eval_prompts,
        environment=environment,
        read_calls=read_calls,
    )


def warn_of_optional_criteria(config: PolicyJob) -> None:
    """Warn if missing feedback of an optional criterion earns more than its criticism."""
    objective = config.objective
    pays_spans = objective.trains_rewards and objective.span_coef > 0
    if not pays_spans or objective.normalize_criteria:
        return
    for name, source in (config.feedback.sources or {}).items():
        if not source.required:
            logger.warning(
                "feedback.sources.%s.required=false: a response without that feedback earns 0 for it, more than one "
                "that is criticised; objective.normalize_criteria=true leaves it out of that comparison",
                name,
            )


def check_measures(eval_prompts: Sequence[Prompt], task: Task) -> None:
    """Raise UserError if the task can measure some held-out prompts and others not: `eval/score` has one measure."""
    missing = [prompt.prompt_id for prompt in eval_prompts if not task.can_measure(prompt)]
    num_measured = len(eval_prompts) - len(missing)
    if missing and num_measured:
        raise UserError(
            f"eval_data: task {task.name} can measure {num_measured} of {len(eval_prompts)} records, and not record "
            f"{missing[0]}, which has no reference or no tests; complete the others or leave them out"
        )


def check_spans(config: PolicyJob, *, has_tools: bool) -> None:
    """Raise UserError if replies are the feedback, and nothing finds spans in them or pays otherwise."""
    feedback = config.feedback
    if feedback.source != "next_message" or feedback.align is not None or config.objective.outcome_rewards or has_tools:
        return
    raise UserError(
        "feedback.source=next_message has replies without spans, and nothing else is paid: set feedback.align, which "
        "finds the spans, or objective.outcome_rewards, or give the environment tools"
    )


def prepare_tools(config: PolicyJob, environment: Environment, tokenizer: Any) -> ReadCalls | None:
    """Put the environment's tools into the tokenizer's chat template; return what reads their calls, None without any.

    Raises:
        UserError: The chat template has no room for tools or replies, or its calls cannot be read.
    """
    if environment.tools is None:
        make_encoder(tokenizer)  # checks the chat template
        return None
    schemas = environment.tools.schemas
    set_tools(tokenizer, schemas, config.model.policy)
    make_encoder(tokenizer, has_tools=True)
    return make_call_reader(tokenizer, schemas, config.rollout.tool_parser, load_tool_parser)


def drop_failing_references(config: PolicyJob, data: PolicyData) -> PolicyData:
    """Return the data with the mode of each record's tests, without records whose reference fails.

    Raises:
        UserError: No prompt is left, or fewer than a step may take.
    """
    checked = partial(check_references, task=data.task, sandbox=config.feedback.sandbox, folder=config.run.folder)
    prompts = checked(data.prompts)
    check_further_prompts(config, len(prompts))
    eval_prompts = checked(data.eval_prompts)
    return replace(data, prompts=prompts, eval_prompts=eval_prompts)
