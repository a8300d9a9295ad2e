"""Outcome rewards: numbers for whole responses, which are paid at the last token (`objective.outcome_rewards`)."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from t2g.concurrency import gather_all
from t2g.config import PolicyJob
from t2g.errors import UserError
from t2g.feedback.sources.user_function import FunctionFailed, UserFunction, load_function
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout, SpanFeedback

KEY = "objective.outcome_rewards"
UNSUPPORTED = "unsupported"  # metric of a task: 1 for a response that cannot be measured here
ARGUMENTS = ("prompts", "completions", "completion_ids")  # of a reward function, beside the records' fields
LARGEST = float(np.finfo(np.float32).max)

Sample = tuple[Rollout, SpanFeedback]
Numbers = Sequence[float | FunctionFailed | None]  # of the responses to a prompt; None: the source does not apply


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
        self._task, self._sandbox = task, config.feedback.sandbox
        self._measure_limit = asyncio.Semaphore(self._sandbox.max_concurrent)
        self._columns = [name for name in dict.fromkeys(n for p in prompts for n in p.payload) if name not in ARGUMENTS]
        self._functions: dict[str, UserFunction] = {}
        feedback = config.feedback.named_sources.values()
        for source in self._sources:
            if source == "task":
                _check_measure(task, prompts)
            elif not source.startswith("metric:"):
                form, options = f"{', '.join(ARGUMENTS)} and the records' fields", (*ARGUMENTS, *self._columns)
                self._functions[source] = UserFunction(
                    load_function(source, f"{KEY}: {source}", form, options=options),
                    kind=f"reward function {source}", key=KEY, log=config.run.folder / "feedback.log",
                    timeout_s=max(f.timeout_s for f in feedback), concurrency=max(f.concurrency for f in feedback),
                    retries=max(f.retries for f in feedback),
                )  # fmt: skip
            elif not config.environment and all(f.source in ("llm", "reward_model", "human") for f in feedback):
                raise UserError(f"{KEY}: {source} is a number of a feedback function, and the feedback is by none")

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[SpanFeedback]:
        """Return the feedback on the responses to a prompt, each with `outcomes`.

        It is failed where a source fails, and where none applies and spans are not paid.

        Raises:
            UserError, RunStopped: As `measure` and `UserFunction.call`.
        """
        columns = await gather_all(self._read_source(source, prompt, samples) for source in self._sources)
        scored = []
        for (rollout, feedback), *row in zip(samples, *columns, strict=True):
            numbers = dict(zip(self._sources, row, strict=True))
            # TRL leaves it out, too. Without an answer it pays the truncation penalty.
            if self._pays_alone and rollout.answer_start is not None and row.count(None) == len(row):
                row = [FunctionFailed(f"no source of {KEY} applies, and objective.span_coef=0 pays nothing else")]
            if feedback.usable and (failed := [str(n) for n in row if isinstance(n, FunctionFailed)]):
                feedback = replace(feedback, status="failed", reason=failed[0])
            scored.append(replace(feedback, outcomes={k: n for k, n in numbers.items() if isinstance(n, float)}))
        return scored

    async def _read_source(self, source: str, prompt: Prompt, samples: Sequence[Sample]) -> Numbers:
        if source not in self._functions:
            return await gather_all(self._read_sample(source, prompt, *sample) for sample in samples)
        try:
            return await self._call(self._functions[source], prompt, [rollout for rollout, _ in samples])
        except FunctionFailed as failed:
            return [failed] * len(samples)

    async def _call(self, function: UserFunction, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Call a reward function as TRL's GRPOTrainer does: with the whole responses, and chats for a chat."""
        count = len(rollouts)
        options = {name: [prompt.payload.get(name)] * count for name in self._columns} | {
            "prompts": [[*map(dict, prompt.messages)] if prompt.is_chat else prompt.prompt_text for _ in rollouts],
            "completions": [list_messages(r) if prompt.is_chat else r.response_text for r in rollouts],
            "completion_ids": [rollout.response_ids.tolist() for rollout in rollouts],
        }
        return await function.call(partial(read_rewards, count=count), prompt.prompt_id, **options)

    async def _read_sample(
        self, source: str, prompt: Prompt, rollout: Rollout, feedback: SpanFeedback
    ) -> float | FunctionFailed | None:
        """Return the task's measure of an answer, or a metric of its feedback."""
        if rollout.answer_start is None or not feedback.usable:
            return None  # there is no answer, or it is not trained on
        if source == "task":
            metrics = await measure(self._task, prompt, rollout.answer, self._sandbox, self._measure_limit)
            return None if metrics.get(UNSUPPORTED) else float(metrics[self._task.score_name])
        found = f"{KEY} pays {source}, and the feedback has {', '.join(feedback.metrics) or 'none'}"
        return feedback.metrics.get(source.removeprefix("metric:"), FunctionFailed(found))


def list_messages(rollout: Rollout) -> list[dict[str, str]]:
    """Return a response as chat messages: one, or the answers of a conversation and the replies between them."""
    if not rollout.conversation:
        return [{"role": "assistant", "content": rollout.response_text}]
    pairs = [(rollout.answer_of(turn), turn.reply) for turn in rollout.conversation]
    roles = ("assistant", "user")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)][:-1]


def read_rewards(answer: Any, *, count: int) -> list[float | None]:
    """Return the numbers of a reward function, None where it does not apply.

    Raises:
        FunctionFailed: The answer is not a list of `count` finite numbers or None.
    """
    if isinstance(answer, str | bytes | dict) or not isinstance(answer, Iterable):
        raise FunctionFailed(f"returned {answer!r:.80}; it needs to return a list of numbers")
    values = [*islice(answer, count + 1)]
    if len(values) != count:
        found = f"more than {count}" if len(values) > count else len(values)
        raise FunctionFailed(f"returned {found} numbers for {count} completions; it needs to return one for each")
    for value in values:  # scalars of numpy and torch have __float__, too; a text has not
        if value is not None and not (hasattr(value, "__float__") and abs(float(value)) <= LARGEST):
            raise FunctionFailed(f"returned {value!r:.80} among its numbers; it needs finite numbers, or None")
    return [None if value is None else float(value) for value in values]


async def measure(
    task: Task, prompt: Prompt, answer: str, sandbox: SandboxConfig, limit: asyncio.Semaphore
) -> dict[str, float]:
    """Return the task's metrics of an answer, with `score_name`. Runs in a thread: a task may execute programs.

    Raises:
        UserError: `Task.can_measure` accepted the prompt, and `Task.measure` does not measure the response.
    """
    async with limit:
        metrics = await asyncio.to_thread(task.measure, prompt, answer, sandbox=sandbox)
    if not metrics or task.score_name not in metrics:
        raise UserError(
            f"task {task.name}: measure gives no {task.score_name} for prompt {prompt.prompt_id}, and can_measure says "
            "that it does; correct one of the two methods"
        )
    return metrics


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
