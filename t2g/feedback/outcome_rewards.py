"""Outcome rewards: numbers for whole responses, which are paid at the last token (`objective.outcome_rewards`)."""

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from t2g.concurrency import gather_all
from t2g.config import PolicyJob
from t2g.errors import RunStopped, UserError
from t2g.feedback.sources.user_function import (
    FunctionFailed,
    UserFunction,
    describe_error,
    load_function,
    run_in_thread,
)
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import Task
from t2g.text.tokenizer import Message
from t2g.text.transcript import list_reply
from t2g.types import Prompt, Rollout, SpanFeedback

KEY = "objective.outcome_rewards"
UNSUPPORTED = "unsupported"  # metric of a task: 1 for a response that cannot be measured here
ARGUMENTS = ("prompts", "completions", "completion_ids")  # a reward function gets them before the records' fields
LARGEST = float(np.finfo(np.float32).max)
MEASURE_TIMEOUT_S = 3600.0  # longer than a measure waits until the programs of all other responses have run

logger = logging.getLogger(__name__)

Sample = tuple[Rollout, SpanFeedback]
Numbers = Sequence[float | FunctionFailed | None]  # one for each response to a prompt; None: the source does not apply


class OutcomeRewards:
    """The sources of outcome rewards."""

    def __init__(self, config: PolicyJob, task: Task, prompts: Sequence[Prompt]) -> None:
        """Load the reward functions, and check each source; nothing is executed.

        Args:
            prompts: All prompts. A function gets the fields of all their records, None for one that a record lacks.

        Raises:
            UserError: The task has no measure, or a prompt has nothing to measure a response against; a reward function
                cannot be called; no feedback function returns metrics.
        """
        self._sources = [entry.source for entry in config.objective.outcome_rewards]
        self._pays_alone = bool(self._sources) and config.objective.span_coef == 0
        self._task = task
        self._sandbox = config.feedback.sandbox
        self._measure_limit = asyncio.Semaphore(self._sandbox.max_concurrent)
        self._columns = _list_columns(prompts)
        self._functions: dict[str, UserFunction] = {}
        for source in self._sources:
            if source == "task":
                _check_measure(task, prompts)
            elif source.startswith("metric:"):
                _check_has_metrics(source, config)
            else:
                self._functions[source] = _load_reward_function(source, config, self._columns)

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[SpanFeedback]:
        """Return the feedback on the responses to a prompt, each with `outcomes`.

        It is failed where a source fails, and where none applies and spans are not paid.

        Raises:
            UserError, RunStopped: As `measure` and `UserFunction.call`.
        """
        columns = await gather_all(self._read_source(source, prompt, samples) for source in self._sources)
        scored: list[SpanFeedback] = []
        for (rollout, feedback), *numbers in zip(samples, *columns, strict=True):
            outcomes: dict[str, float] = {}
            failures: list[str] = []
            for source, number in zip(self._sources, numbers, strict=True):
                if isinstance(number, float):
                    outcomes[source] = number
                elif isinstance(number, FunctionFailed):
                    failures.append(str(number))

            # TRL leaves it out, too. Without an answer it pays the truncation penalty.
            no_source_applies = numbers.count(None) == len(numbers)
            if self._pays_alone and no_source_applies and rollout.answer_start is not None:
                failures.append(f"no source of {KEY} applies, and objective.span_coef=0 pays nothing else")
            if failures and feedback.usable:
                feedback = replace(feedback, status="failed", reason=failures[0])
            scored.append(replace(feedback, outcomes=outcomes))
        return scored

    async def _read_source(self, source: str, prompt: Prompt, samples: Sequence[Sample]) -> Numbers:
        function = self._functions.get(source)
        if function is None:
            return await gather_all(self._read_sample(source, prompt, *sample) for sample in samples)
        rollouts = [rollout for rollout, _ in samples]
        try:
            return await self._call(function, prompt, rollouts)
        except FunctionFailed as failed:
            return [failed] * len(samples)

    async def _call(self, function: UserFunction, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Call a reward function as TRL's GRPOTrainer does: with the whole responses, and chats for a chat."""
        count = len(rollouts)
        options: dict[str, list[Any]] = {}
        for name in self._columns:
            options[name] = [prompt.payload.get(name)] * count

        if prompt.is_chat:
            options["prompts"] = [_copy_messages(prompt) for _ in rollouts]
            options["completions"] = [list_messages(rollout) for rollout in rollouts]
        else:
            options["prompts"] = [prompt.prompt_text] * count
            options["completions"] = [rollout.response_text for rollout in rollouts]
        options["completion_ids"] = [rollout.response_ids.tolist() for rollout in rollouts]

        read = partial(read_rewards, count=count)
        return await function.call(read, prompt.prompt_id, **options)

    async def _read_sample(
        self, source: str, prompt: Prompt, rollout: Rollout, feedback: SpanFeedback
    ) -> float | FunctionFailed | None:
        """Return the task's measure of an answer, or a metric of its feedback."""
        if rollout.answer_start is None or not feedback.usable:
            return None  # there is no answer, or it is not trained on
        if source == "task":
            metrics = await measure(self._task, prompt, rollout.answer, self._sandbox, self._measure_limit)
            if metrics.get(UNSUPPORTED):
                return None
            return float(metrics[self._task.score_name])

        name = source.removeprefix("metric:")
        if name not in feedback.metrics:
            names = ", ".join(feedback.metrics) or "none"
            return FunctionFailed(f"{KEY} pays {source}, and the feedback has {names}")
        return feedback.metrics[name]


def _list_columns(prompts: Sequence[Prompt]) -> list[str]:
    """Return the names of the records' fields that a reward function gets."""
    names: dict[str, None] = {}
    for prompt in prompts:
        names |= dict.fromkeys(prompt.payload)
    return [name for name in names if name not in ARGUMENTS]


def _load_reward_function(source: str, config: PolicyJob, columns: Sequence[str]) -> UserFunction:
    """Return the function, with the largest limits of the feedback sources."""
    feedback = config.feedback.named_sources.values()
    form = f"{', '.join(ARGUMENTS)} and the records' fields"
    function = load_function(source, f"{KEY}: {source}", form, options=(*ARGUMENTS, *columns))
    timeout_s = max(entry.timeout_s for entry in feedback)
    concurrency = max(entry.concurrency for entry in feedback)
    retries = max(entry.retries for entry in feedback)
    return UserFunction(
        function,
        kind=f"reward function {source}",
        key=KEY,
        log=config.run.folder / "feedback.log",
        timeout_s=timeout_s,
        concurrency=concurrency,
        retries=retries,
    )


def _copy_messages(prompt: Prompt) -> list[dict[str, str]]:
    return [dict(message) for message in prompt.messages]


def list_messages(rollout: Rollout) -> list[Message]:
    """Return a response as chat messages: one, or the answers of a conversation and the replies between them."""
    if not rollout.environment_turns:
        return [{"role": "assistant", "content": rollout.response_text}]
    last_answer = {"role": "assistant", "content": rollout.answer_of(rollout.environment_turns[-1])}
    return [*list_history(rollout, len(rollout.environment_turns) - 1), last_answer]


def list_history(rollout: Rollout, num_turns: int) -> list[Message]:
    """Return the first turns of a conversation and the replies to them, as chat messages."""
    messages: list[Message] = []
    for turn in rollout.environment_turns[:num_turns]:
        messages.append({"role": "assistant", "content": rollout.answer_of(turn)})
        messages += list_reply(turn.reply, turn.results)
    return messages


def read_rewards(answer: Any, *, count: int) -> list[float | None]:
    """Return the numbers of a reward function, None where it does not apply.

    Raises:
        FunctionFailed: The answer is not a list of `count` finite numbers or None.
    """
    if isinstance(answer, str | bytes | dict) or not isinstance(answer, Iterable):
        raise FunctionFailed(f"returned {answer!r:.80}; it needs to return a list of numbers")
    values = [*islice(answer, count + 1)]
    if len(values) != count:
        length_text = f"more than {count}" if len(values) > count else len(values)
        raise FunctionFailed(f"returned {length_text} numbers for {count} completions; it needs to return one for each")
    numbers: list[float | None] = []
    for value in values:
        if value is None:
            numbers.append(None)
            continue
        number = _to_float(value)
        if not abs(number) <= LARGEST:
            raise FunctionFailed(f"returned {value!r:.80} among its numbers; it needs finite numbers, or None")
        numbers.append(number)
    return numbers


def _to_float(value: Any) -> float:
    """Return a number as float: nan for what is no number, inf for an integer of hundreds of digits."""
    if not hasattr(value, "__float__"):  # scalars of numpy and torch have it, too; a text has not
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


async def measure(
    task: Task, prompt: Prompt, answer: str, sandbox: SandboxConfig, limit: asyncio.Semaphore
) -> dict[str, float]:
    """Return the task's metrics of an answer, with `score_name`.

    Raises:
        UserError: `Task.can_measure` accepted the prompt, and `Task.measure` does not measure the response.
        RunStopped: As `measure_any`.
    """
    metrics = await measure_any(task, prompt, answer, sandbox, limit)
    if task.score_name not in metrics:
        raise UserError(
            f"task {task.name}: measure gives no {task.score_name} for prompt {prompt.prompt_id}, and can_measure says "
            "that it does; correct one of the two methods"
        )
    return metrics


async def measure_any(
    task: Task, prompt: Prompt, answer: str, sandbox: SandboxConfig, limit: asyncio.Semaphore
) -> dict[str, float]:
    """Return the task's metrics of an answer, {} if it has none. Runs in a thread: a task may execute programs.

    Raises:
        RunStopped: `Task.measure` raised an error other than UserError, or did not return in time.
    """
    call = partial(_measure_or_catch, task, prompt, answer, sandbox)
    async with limit:
        try:
            metrics = await asyncio.wait_for(run_in_thread(call), MEASURE_TIMEOUT_S)
        except TimeoutError:
            raise RunStopped(
                f"task {task.name}: measure did not return within {MEASURE_TIMEOUT_S:g} s, for prompt "
                f"{prompt.prompt_id}; give what it calls a timeout"
            ) from None
    if isinstance(metrics, UserError | RunStopped):
        raise metrics
    if isinstance(metrics, Exception | SystemExit):
        logger.error("task %s: measure raised an error, for prompt %s", task.name, prompt.prompt_id, exc_info=metrics)
        reason = describe_error(metrics)
        raise RunStopped(f"task {task.name}: measure raised {reason}, for prompt {prompt.prompt_id}") from metrics
    if isinstance(metrics, BaseException):
        raise metrics
    return metrics or {}


def _measure_or_catch(
    task: Task, prompt: Prompt, answer: str, sandbox: SandboxConfig
) -> dict[str, float] | BaseException | None:
    try:
        return task.measure(prompt, answer, sandbox=sandbox)
    except BaseException as error:  # noqa: BLE001 a user's task may raise anything
        return error


def _check_has_metrics(source: str, config: PolicyJob) -> None:
    feedback = config.feedback.named_sources.values()
    has_function = any(entry.source not in ("llm", "reward_model", "human") for entry in feedback)
    if not config.environment and not has_function:
        raise UserError(f"{KEY}: {source} is a number of a feedback function, and the feedback is by none")


def _check_measure(task: Task, prompts: Sequence[Prompt]) -> None:
    if not task.score_name:
        raise UserError(f"{KEY}: source task pays the task's measure, and task {task.name} has none; remove it")
    missing = [prompt.prompt_id for prompt in prompts if not task.can_measure(prompt)]
    if missing:
        raise UserError(
            f"{KEY}: source task pays {task.score_name}, and {len(missing)} of {len(prompts)} prompts of data.path "
            f"have no reference or tests to measure a response against, the first is prompt {missing[0]}; complete or "
            "remove their records, or remove the source"
        )
