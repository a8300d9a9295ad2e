"""Policies on the same prompts: sampled and measured, compared by judges, reported.

Every answer is a line of a journal: responses/<policy>/responses.jsonl, scores/<policy>.jsonl, feedback/<policy>.jsonl,
judgements.jsonl. Each line has a key, a hash of what it was made of; a line with another key is ignored, and its work
is done anew. A job that was killed asks for the missing lines only; a policy or a judge may come later. Engines of two
policies never run at the same time.
"""

import asyncio
import inspect
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

from actors.engines.rollout import sample_seed
from jobs.common.cli import StopFlag
from jobs.common.journals import DRAIN_S, Items, Limits, MakeRow, Row, make_missing_rows, read_rows
from jobs.common.run_folder import SMOKE_PROMPTS, begin_folder
from jobs.evaluate.feedback_scores import FeedbackScores, JudgedResponses, ServeFeedback, find_feedback
from t2g.concurrency import gather_all
from t2g.config import LLMConfig, ModelConfig, PolicyEvaluationJob, StyleConfig
from t2g.config.evaluation import ADAPTER_FILE, RESPONSES
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.errors import UserError
from t2g.feedback.outcome_rewards import measure_any
from t2g.feedback.sources.chat_client import ChatClient, ChatRequest
from t2g.feedback.sources.endpoint import EndpointChat
from t2g.feedback.sources.program import ProgramFeedback
from t2g.interfaces import RolloutSource, Sampling
from t2g.loop.sampling import make_sampling
from t2g.report.policy_page import write_policy_evaluation
from t2g.runs.contents import model_version, source_hash
from t2g.runs.versions import collect_versions
from t2g.study.pairwise import PairwiseJudgement, make_judge_request, read_verdict, win_rates
from t2g.study.policy_eval import (
    PASSED,
    Answers,
    Response,
    Scores,
    add_feedback,
    bert_score,
    columns,
    content_key,
    summarize,
)
from t2g.tasks.base import Record, Task, describe_record, get_task
from t2g.tasks.human_eval import convert_to_kodcode
from t2g.tasks.references import check_references
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.text.thinking import find_thinking_tags
from t2g.types import Prompt, SpanFeedback

SCORES = "scores"
JUDGEMENTS = "judgements.jsonl"
MERGED = "merged"
MAX_SEED = 2**31 - 1  # that every server takes

Questions = tuple[Task, Sequence[Record], Sequence[Prompt]]
Texts = tuple[Prompt, list[str]]  # the responses to a prompt
Serve = Callable[[ModelConfig], AbstractContextManager[RolloutSource]]  # engines of a model, as long as the block


def read_questions(config: PolicyEvaluationJob) -> Questions:
    """Return the task, the records, and their prompts without token ids, in the same order.

    Raises:
        UserError: The data cannot be read, or a record cannot be measured.
    """
    task = get_task(config.task)
    limit = SMOKE_PROMPTS if config.run.smoke else None
    records: Sequence[Record] = load_records(config.data)[:limit]
    if task.score_name == PASSED:
        records = convert_to_kodcode(records)
    prompts = make_prompts(records, task, None, 0)
    if len(prompts) < 2:
        raise UserError(f"data.path={config.data.name} has one record; an interval needs two prompts or more")
    for number, prompt in enumerate(prompts, start=1):
        if task.score_name and not task.can_measure(prompt):
            where = describe_record(records[number - 1], number)
            raise UserError(
                f"{where} has no reference and no tests, and task {task.name} "
                f"measures {task.score_name}: complete it or leave it out (task=prompts measures what needs neither)"
            )
    return task, records, prompts


def served_version(model: ModelConfig) -> str:
    """Return a key that changes with the name and weights of a model, and with those of an adapter's base."""
    version = model_version(model.policy, model.revision)
    adapter = Path(model.policy) / ADAPTER_FILE
    if not adapter.exists():
        return content_key(version, "")
    options = json.loads(adapter.read_text())
    base_name = str(options.get("base_model_name_or_path"))
    base = model_version(base_name, options.get("revision"))
    return content_key(version, base)


def measure_version(config: PolicyEvaluationJob, task: Task) -> str:
    """Return a key that changes with the source of the task and its base classes, settings, and package versions."""
    classes = type(task).__mro__[:-1]
    modules = dict.fromkeys(filter(None, map(inspect.getmodule, classes)))
    module_sources = [inspect.getsource(module) for module in modules]
    source = module_sources, source_hash(config.task)
    encoder = config.bertscore and (model_version(config.bertscore, None), config.bertscore_layer)
    return content_key(source, config.sandbox.dump_limits(), encoder, collect_versions())


class Evaluation:
    """One evaluation in its run folder, which it creates.

    Raises:
        UserError: The data, a model or a prompt cannot be used, a key is missing, or the folder holds responses of
            other sampling settings.
    """

    def __init__(self, config: PolicyEvaluationJob, questions: Questions | None = None) -> None:
        self.config = config
        self.task, records, self.prompts = questions or read_questions(config)
        self._records: dict[str, Record] = {}
        for prompt, record in zip(self.prompts, records, strict=True):
            self._records[prompt.prompt_id] = record
        self.folder = begin_folder(config)
        self.prompts = check_references(self.prompts, self.task, config.sandbox, self.folder, leave_out=False)
        self._clients: dict[str, ChatClient] = {}  # settings of a server as JSON -> its client
        for llm in (*config.endpoints.values(), *config.judges.values()):
            self._clients[llm.model_dump_json()] = ChatClient(EndpointChat(llm), llm, config.timeout_s)
        self._measure_version = measure_version(config, self.task)
        self._feedback = FeedbackScores(config, config.feedback, self.folder) if config.feedback else None
        self._answer_files = {name: self.folder / RESPONSES / name / "responses.jsonl" for name in config.names}
        self._models = {name: self._model(name) for name in config.policies}
        self._keyed_prompts = {name: self._make_keyed_prompts(name) for name in config.names}

    def _find_client(self, llm: LLMConfig) -> ChatClient:
        return self._clients[llm.model_dump_json()]

    def _model(self, name: str) -> ModelConfig:
        """Return the model that engines load; an adapter is merged into its base first."""
        model = self.config.policies[name]
        if not (Path(model.policy) / ADAPTER_FILE).exists():
            return model
        merged = self.folder / MERGED / name / served_version(model)
        if not merged.exists():
            from actors.learner.lora import merge_adapter

            shutil.rmtree(merged.parent, ignore_errors=True)  # merged from other weights
            merge_adapter(Path(model.policy), merged, self.config.rollout.dtype)
        return model.model_copy(update={"policy": str(merged), "revision": None})

    def _make_keyed_prompts(self, name: str) -> dict[str, Prompt]:
        """Return the prompts by the keys of a policy's responses, in order: keys of its weights and of what it reads.

        Prompts for engines have the token ids of the model's own tokenizer and chat template.
        """
        keyed: dict[str, Prompt] = {}
        temperature = [self.config.temperatures[name]] if name in self.config.temperatures else []
        if endpoint := self.config.endpoints.get(name):
            for prompt in self.prompts:
                messages = self.task.policy_messages(self._records[prompt.prompt_id])
                key = content_key(endpoint.url, endpoint.model, prompt.prompt_id, messages, *temperature)
                keyed[key] = prompt
            return keyed

        model = self._models[name]
        tokenizer = load_policy_tokenizer(model)
        room = self.config.rollout.max_prompt_tokens
        too_long = self.config.data.too_long
        records = [*self._records.values()]
        prompts = make_prompts(records, self.task, tokenizer, room, too_long=too_long)

        served = served_version(self.config.policies[name])
        version: list[Any] = [served, False, *temperature]  # False: as in the keys of earlier journals
        if (tags := find_thinking_tags(tokenizer, model.thinking_tags)) is not None:
            version.append(tags)
        for prompt in prompts:
            key = content_key(version, prompt.prompt_id, prompt.prompt_ids.tolist())
            keyed[key] = prompt
        return keyed

    def run(self, serve: Serve, stop: StopFlag, serve_feedback: ServeFeedback | None = None) -> dict[str, Any]:
        """Make the rows that the journals lack, write the report, and return the content of evaluation.json.

        Args:
            serve: Called for each policy that lacks responses, one by one.
            serve_feedback: Called once, if the feedback source has responses to judge.

        Raises:
            RunStopped: A server did not answer some requests; the others are answered.
            Stopped: `stop` was set.
        """
        for name in filter(self.is_incomplete, self.config.names):
            engines = serve(self._models[name]) if name in self._models else nullcontext()
            with engines as source:
                self._sample(name, source, stop)
        scores = {name: self._score(name, stop) for name in self.config.names}
        judgements: list[PairwiseJudgement] = []
        for name in self.config.judges:
            judgements += self._judge(name, stop)
        feedback = self._judge_by_feedback(serve_feedback, stop) if serve_feedback else {}
        return self._report(scores, judgements, feedback)

    # ------------------------------------------------------------------------------------------------------- responses
    def answers(self, name: str) -> list[Answers]:
        """Return what this policy has answered, in the order of the prompts."""
        rows = read_rows(self._answer_files[name], Answers)
        return [rows[key] for key in self._keyed_prompts[name] if key in rows]

    def is_incomplete(self, name: str) -> bool:
        """Return whether this policy has prompts to answer."""
        return len(self.answers(name)) < len(self.prompts)

    def _sample(self, name: str, source: RolloutSource | None, stop: StopFlag) -> None:
        """Sample the responses that a policy lacks. source: engines; None: the policy is behind a server."""
        config = self.config
        rollout = config.rollout
        sampling = make_sampling(config, "eval", 0, num_samples=rollout.samples_per_prompt)
        sampling = replace(sampling, temperature=config.temperatures.get(name, rollout.temperature))

        async def make_row(key: str, prompt: Prompt) -> Answers:
            if source:
                rollouts = await source.sample(prompt, sampling)
                answers = [(rollout.answer, rollout.finish_reason) for rollout in rollouts]
            else:
                client = self._find_client(self.config.endpoints[name])
                requests = [self._to_server(prompt, sampling, index) for index in range(sampling.num_samples)]
                replies = await gather_all(map(client.request, requests))
                answers = [(reply.text, reply.finish_reason) for reply in replies]
            responses = tuple(Response(text=text, truncated=reason == "length") for text, reason in answers)
            return Answers(prompt_id=prompt.prompt_id, key=key, responses=responses)

        path = self._answer_files[name]
        prompts = self._keyed_prompts[name]
        limits = Limits(2 * rollout.workers.max * rollout.max_num_seqs, DRAIN_S)
        if endpoint := config.endpoints.get(name):
            limits = Limits(endpoint.concurrency, config.timeout_s)
        _make_rows(path, Answers, f"responses of {name}", prompts, make_row, limits, stop)

    def _to_server(self, prompt: Prompt, sampling: Sampling, index: int) -> ChatRequest:
        seed = sample_seed(sampling.seed, prompt.prompt_id, index)
        messages = self.task.policy_messages(self._records[prompt.prompt_id])
        return ChatRequest(
            messages=messages,
            schema={},
            max_output_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=seed & MAX_SEED,
        )

    # -------------------------------------------------------------------------------------- scores, judgements, report
    def _score(self, name: str, stop: StopFlag) -> list[Scores]:
        """Return what the task measures of a policy's responses, by prompt; measure what the journal lacks."""
        config = self.config
        items: dict[str, Texts] = {}
        for prompt, row in zip(self.prompts, self.answers(name), strict=True):
            texts = [response.text for response in row.responses]
            key = content_key(self._measure_version, prompt.prompt_id, prompt.prompt_text, prompt.payload, texts)
            items[key] = prompt, texts

        limit = asyncio.Semaphore(config.concurrency)

        async def make_row(key: str, item: Texts) -> Scores:
            prompt, texts = item
            scores = [await measure_any(self.task, prompt, text, config.sandbox, limit) for text in texts]
            if config.bertscore:
                await asyncio.to_thread(self._add_bert_scores, prompt, texts, scores)
            return Scores(prompt_id=prompt.prompt_id, key=key, scores=tuple(scores))

        path = self.folder / SCORES / f"{name}.jsonl"
        limits = Limits(config.concurrency, DRAIN_S)
        return _make_rows(path, Scores, f"scores of {name}", items, make_row, limits, stop)

    def _add_bert_scores(self, prompt: Prompt, texts: Sequence[str], scores: Sequence[dict[str, float]]) -> None:
        config = self.config
        assert config.bertscore is not None
        reference = self._read_reference(prompt) or ""
        for text, score in zip(texts, scores, strict=True):
            score["bertscore"] = bert_score(text, reference, config.bertscore, config.bertscore_layer)

    def _read_reference(self, prompt: Prompt) -> str | None:
        """Return the reference of a prompt; None if it is no text, which only its feedback function understands."""
        try:
            return self.task.reference(self._records[prompt.prompt_id])
        except ValueError:
            return None

    def lacks_feedback(self) -> bool:
        """Return whether the feedback source has responses to judge."""
        if self._feedback is None:
            return False
        if any(map(self.is_incomplete, self.config.names)):
            return True
        return any(map(self._is_unjudged, self.config.names))

    def _is_unjudged(self, name: str) -> bool:
        assert self._feedback is not None
        return self._feedback.missing(name, self.prompts, self.answers(name))

    def _judge_by_feedback(self, serve_feedback: ServeFeedback, stop: StopFlag) -> dict[str, list[JudgedResponses]]:
        """Return the feedback on each policy's responses, by prompt."""
        if self._feedback is None:
            return {}
        # Without a cluster, engines that are not needed would start a local Ray.
        needs_source = any(map(self._is_unjudged, self.config.names))
        with serve_feedback() if needs_source else nullcontext() as source:
            feedback: dict[str, list[JudgedResponses]] = {}
            for name in self.config.names:
                feedback[name] = self._feedback.judge(name, self.prompts, self.answers(name), source, stop)
            return feedback

    def _judge(self, name: str, stop: StopFlag) -> list[PairwiseJudgement]:
        """Return a judge's verdicts on the first responses of every pair, in both orders; ask for missing ones."""
        llm = self.config.judges[name]
        items: dict[str, tuple[PairwiseJudgement, ChatRequest]] = {}
        answers = {policy: self.answers(policy) for policy in self.config.names}
        for first, second in permutations(self.config.names, 2):
            for prompt, *rows in zip(self.prompts, answers[first], answers[second], strict=True):
                texts = [row.responses[0].text for row in rows]
                request = make_judge_request(self.task, prompt.prompt_text, *texts, llm)
                about = {"judge": name, "prompt_id": prompt.prompt_id, "first": first, "second": second}
                key = content_key(about, llm.url, llm.model, request)
                items[key] = PairwiseJudgement(key=key, **about), request

        async def make_row(key: str, item: tuple[PairwiseJudgement, ChatRequest]) -> PairwiseJudgement:
            row, request = item
            answer = await self._find_client(llm).request(request)
            return row.model_copy(update=read_verdict(answer.text))

        path = self.folder / JUDGEMENTS
        limits = Limits(llm.concurrency, self.config.timeout_s)
        return _make_rows(path, PairwiseJudgement, f"judge {name}", items, make_row, limits, stop)

    def _report(
        self,
        scores: Mapping[str, Sequence[Scores]],
        judgements: Sequence[PairwiseJudgement],
        feedback: Mapping[str, Sequence[JudgedResponses]],
    ) -> dict[str, Any]:
        """Write the report of all policies. scores and feedback: policy -> by prompt."""
        config = self.config
        seed = config.run.seed
        references = [self._read_reference(prompt) for prompt in self.prompts]
        answers = {name: self.answers(name) for name in config.names}
        measured = {name: columns(rows, scores[name], references, config.pass_at) for name, rows in answers.items()}
        if self._feedback is not None:
            for name, rows in feedback.items():
                response_scores = self._feedback.scores(rows)
                measured[name] = add_feedback(measured[name], response_scores)
        judged = win_rates(judgements, answers, seed=seed)
        summary = summarize(measured, seed=seed)

        judge_by_program = self._make_judge()
        about = self._describe()
        find_example = find_feedback(feedback) if feedback else judge_by_program
        return write_policy_evaluation(
            self.folder, about, self.prompts, answers, measured, summary, judged, find_example
        )

    def _describe(self) -> dict[str, Any]:
        """Return what the report says of the evaluation."""
        config = self.config
        about: dict[str, Any] = {
            "task": config.task,
            "data": config.data.name,
            "prompts": len(self.prompts),
            "seed": config.run.seed,
        }
        about |= config.rollout.model_dump(include={"samples_per_prompt", "temperature", "max_new_tokens"})
        if config.temperatures:
            about["temperatures"] = config.temperatures
        if config.feedback:
            about["feedback"] = config.feedback.describe()
        return about

    def _make_judge(self) -> Callable[[Prompt, str], SpanFeedback | None]:
        """Return a function that judges a response by the program of the task, if it has one."""
        function = self.task.make_feedback_function(style=StyleConfig(), sandbox=self.config.sandbox)
        program = None if function is None else ProgramFeedback(function, timeout_s=self.config.timeout_s)

        def judge(prompt: Prompt, text: str) -> SpanFeedback | None:
            if program is None:
                return None
            return asyncio.run(program.judge(prompt, text))

        return judge


def _make_rows(
    path: Path, schema: type[Row], title: str, items: Items, make_row: MakeRow, limits: Limits, stop: StopFlag
) -> list[Row]:
    """Return the rows of a journal for the items, in their order; make those that it lacks."""
    read = partial(read_rows, path, schema)
    rows = make_missing_rows(path, title, items, make_row, read=read, limits=limits, stop=stop)
    return [*rows.values()]
