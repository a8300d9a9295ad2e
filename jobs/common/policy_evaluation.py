"""Policies on the same prompts: sampled and measured, compared by judges, reported.

Every answer is a line of a journal: responses/<policy>/responses.jsonl, scores/<policy>.jsonl, judgements.jsonl. Each
line has a key, a hash of what it was made of; a line with another key is ignored, and its work is done anew. A job that
was killed asks for the missing lines, and for no other; a policy or a judge may come later. Engines of two policies
never live at one time.
"""

import asyncio
import inspect
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from actors.engines.rollout import sample_seed
from jobs.common.annotation_runs import DRAIN_S, attended
from jobs.common.cli import StopFlag
from jobs.common.run_folder import begin_folder
from t2g.concurrency import together
from t2g.config import ModelConfig, PolicyEvaluationJob
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.errors import RunStopped, SamplingFailed, UserError
from t2g.feedback.sources.asking import Asker, ChatFailed, Question
from t2g.feedback.sources.endpoint import EndpointChat
from t2g.files import weights_version
from t2g.interfaces import RolloutSource, Sampling
from t2g.loop.annotation import Turns
from t2g.loop.steps import sampling_seed
from t2g.report.policy_page import write_policy_evaluation
from t2g.runs.journal import Journal, read_journal
from t2g.runs.progress import stage
from t2g.runs.versions import versions
from t2g.study.pairwise import Judgement, question, read_verdict, win_rates
from t2g.study.policy_eval import PASSED, Answers, Response, Scores, bert_score, columns, content_key, summarise
from t2g.study.reflection import Reflecting
from t2g.tasks.base import Record, Task, get_task
from t2g.tasks.human_eval import as_kodcode
from t2g.text.tokenizer import load_tokenizer
from t2g.types import Prompt

RESPONSES, SCORES, JUDGEMENTS, MERGED = "responses", "scores", "judgements.jsonl", "merged"
ADAPTER_FILE = "adapter_config.json"
SMOKE_PROMPTS = 3
MAX_SEED = 2**31 - 1  # that every server takes

Item = TypeVar("Item")
Row = TypeVar("Row", Answers, Scores)
Ask = Callable[[Item], Awaitable[BaseModel]]
Questions = tuple[Task, Sequence[Record], Sequence[Prompt]]
Serve = Callable[[ModelConfig], AbstractContextManager[RolloutSource]]  # engines of a model, as long as the block


def read_questions(config: PolicyEvaluationJob) -> Questions:
    """What every policy is asked: records and prompts, which have nobody's token ids, in one order. UserError for data
    that cannot be used.
    """
    task = get_task(config.task)
    records: Sequence[Record] = load_records(config.data)[: SMOKE_PROMPTS if config.run.smoke else None]
    if task.score_name == PASSED:
        records = as_kodcode(records)
    prompts = make_prompts(records, task, None, 0)
    if len(prompts) < 2:
        raise UserError(f"data.path={config.data.path} has one record; an interval needs two prompts or more")
    for number, prompt in enumerate(prompts, start=1):
        tests = isinstance(prompt.payload.get("test"), str)  # which run on responses alone
        if task.score_name and not (tests or task.measure(prompt, "", sandbox=config.sandbox)):
            raise UserError(
                f"data record {number} of {config.data.path} has no reference and no tests, and task {task.name} "
                f"measures {task.score_name}: complete it or leave it out (task=prompts measures what needs neither)"
            )
    return task, records, prompts


def model_version(model: ModelConfig) -> str:
    """Return a key that changes with the name and weights of a model, and with those of an adapter's base."""
    adapter, base = Path(model.policy) / ADAPTER_FILE, ""
    if adapter.exists():
        options = json.loads(adapter.read_text())
        base = weights_version(str(options.get("base_model_name_or_path")), options.get("revision"))
    return content_key(model.policy, weights_version(model.policy, model.revision), base)


def measure_version(config: PolicyEvaluationJob, task: Task) -> str:
    """Return a key that changes with the file of the task's class, the settings of its measures, and packages."""
    encoder = weights_version(config.bertscore, None) if config.bertscore else ""
    source = inspect.getsource(inspect.getmodule(type(task)) or type(task))
    return content_key(source, config.sandbox, config.bertscore, encoder, config.bertscore_layer, versions())


def read_rows(path: Path, schema: type[Row], keys: Mapping[str, str]) -> dict[str, Row]:
    """Return the rows of a journal by prompt_id, without those of another key than the prompt has in `keys`."""
    return {row.prompt_id: row for row in read_journal(path, schema) if row.key == keys.get(row.prompt_id)}


class Evaluation:
    """One evaluation in its run folder, which it begins. UserError for what cannot be asked: data, a model, a prompt
    that is too long, a server without a key, a folder with responses that were sampled otherwise.
    """

    def __init__(self, config: PolicyEvaluationJob, questions: Questions | None = None) -> None:
        self.config, (self.task, records, self.prompts) = config, questions or read_questions(config)
        self._records = {prompt.prompt_id: record for prompt, record in zip(self.prompts, records, strict=True)}
        self.folder = begin_folder(config, RESPONSES)
        servers = [*config.endpoints.values(), *config.judges.values()]
        self._askers = {llm: Asker(EndpointChat(llm), llm, config.timeout_s) for llm in servers}
        self._measure_version = measure_version(config, self.task)
        self._models = {name: self._model(name) for name in config.served}
        self._own_prompts = {name: self._encoded(model) for name, model in self._models.items()}
        self._answer_keys = {name: self._keys_of_answers(name) for name in config.names}
        for folder in (SCORES, *(f"{RESPONSES}/{name}" for name in config.names)):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)

    def _keys_of_answers(self, name: str) -> dict[str, str]:
        """Return the key of a policy's responses by prompt_id: of its weights, and of what the policy reads."""
        if name in self._models:
            version = [model_version(self.config.served[name]), name in self.config.reflections]
            asked = {p.prompt_id: p.prompt_ids.tolist() for p in self._own_prompts[name]}
        else:
            version = [self.config.endpoints[name].model]
            asked = {i: self.task.policy_messages(record) for i, record in self._records.items()}
        return {prompt_id: content_key(version, content) for prompt_id, content in asked.items()}

    def _model(self, name: str) -> ModelConfig:
        """What engines load: an adapter is merged into its base first."""
        model = self.config.served[name]
        if not (Path(model.policy) / ADAPTER_FILE).exists():
            return model
        merged = self.folder / MERGED / name / model_version(model)
        if not merged.exists():
            from actors.learner.lora import merge_adapter

            shutil.rmtree(merged.parent, ignore_errors=True)  # of other weights
            merge_adapter(Path(model.policy), merged, self.config.rollout.dtype)
        return ModelConfig(policy=str(merged))

    def _encoded(self, model: ModelConfig) -> Sequence[Prompt]:
        """The prompts with the token ids of the model's own tokenizer and chat template."""
        rollout = self.config.rollout
        tokenizer = load_tokenizer(model.policy, model.revision)
        return make_prompts([*self._records.values()], self.task, tokenizer, rollout.max_prompt_tokens)

    def run(self, serve: Serve, stop: StopFlag) -> dict[str, Any]:
        """All that the journals lack, then the report; returns what evaluation.json holds.

        serve: asked for one policy after the other, for those alone that lack responses. Stopped; RunStopped when a
        server left questions without an answer, once the others are answered.
        """
        for name in filter(self.missing, self.config.names):
            with serve(self._models[name]) if name in self._models else nullcontext() as source:
                self._sample(name, self._reflecting(name, source), stop)
        scores = {name: self._score(name, stop) for name in self.config.names}
        judgements = [row for name in self.config.judges for row in self._judge(name, stop)]
        return self._report(scores, judgements)

    # ------------------------------------------------------------------------------------------------------- responses
    def answers(self, name: str) -> dict[str, Answers]:
        return read_rows(self._answers_file(name), Answers, self._answer_keys[name])

    def _answers_file(self, name: str) -> Path:
        return self.folder / RESPONSES / name / "responses.jsonl"

    def missing(self, name: str) -> list[Prompt]:
        """What this policy has not answered."""
        known, prompts = self.answers(name), self._own_prompts.get(name, self.prompts)
        return [prompt for prompt in prompts if prompt.prompt_id not in known]

    def _reflecting(self, name: str, source: RolloutSource | None) -> RolloutSource | None:
        """`source` as it is, but for a policy that reflects."""
        if source is None or name not in self.config.reflections:
            return source
        model, room = self._models[name], self.config.rollout.max_prompt_tokens
        tokenizer = load_tokenizer(model.policy, model.revision)
        return Reflecting(rollouts=source, task=self.task, tokenizer=tokenizer, max_prompt_tokens=room)

    def _sample(self, name: str, source: RolloutSource | None, stop: StopFlag) -> None:
        """source: engines; None: the policy is behind a server."""
        config, rollout = self.config, self.config.rollout
        sampling = Sampling(
            num_samples=rollout.samples_per_prompt,
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            seed=sampling_seed(config.run.seed, "eval", 0),  # as of held-out samples in a training
        )

        async def ask(prompt: Prompt) -> Answers:
            if source:
                said = [(r.response_text, r.finish_reason) for r in await source.sample(prompt, sampling)]
            else:
                asker = self._askers[self.config.endpoints[name]]
                asked = (asker.ask(self._to_server(prompt, sampling, i)) for i in range(sampling.num_samples))
                said = [(answer.text, answer.finish_reason) for answer in await together(asked)]
            responses = tuple(Response(text=text, cut=reason == "length") for text, reason in said)
            key = self._answer_keys[name][prompt.prompt_id]
            return Answers(prompt_id=prompt.prompt_id, key=key, responses=responses)

        far, path = config.endpoints.get(name), self._answers_file(name)
        at_once = far.concurrency if far else 2 * rollout.workers.max * rollout.max_num_seqs
        patience_s = config.timeout_s if far else DRAIN_S
        collect(path, f"responses of {name}", self.missing(name), ask, at_once, patience_s, stop)

    def _to_server(self, prompt: Prompt, sampling: Sampling, index: int) -> Question:
        return Question(
            messages=self.task.policy_messages(self._records[prompt.prompt_id]),
            schema={},
            max_output_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=sample_seed(sampling.seed, prompt.prompt_id, index) & MAX_SEED,
        )

    # -------------------------------------------------------------------------------------- scores, judgements, report
    def _score(self, name: str, stop: StopFlag) -> list[Scores]:
        """Return what the task measures of a policy's responses, by prompt; measure what the journal lacks."""
        config, path = self.config, self.folder / SCORES / f"{name}.jsonl"
        texts = {i: [response.text for response in row.responses] for i, row in self.answers(name).items()}
        keys = {
            p.prompt_id: content_key(self._measure_version, p.prompt_text, p.payload, texts[p.prompt_id])
            for p in self.prompts
        }

        def measure(prompt: Prompt) -> Scores:
            scores = [self.task.measure(prompt, t, sandbox=config.sandbox) or {} for t in texts[prompt.prompt_id]]
            if config.bertscore:
                reference = self.task.reference(prompt.payload) or ""
                for text, found in zip(texts[prompt.prompt_id], scores, strict=True):
                    found["bertscore"] = bert_score(text, reference, config.bertscore, config.bertscore_layer)
            return Scores(prompt_id=prompt.prompt_id, key=keys[prompt.prompt_id], scores=tuple(scores))

        known = read_rows(path, Scores, keys)
        missing = [p for p in self.prompts if p.prompt_id not in known]
        ask = partial(asyncio.to_thread, measure)
        collect(path, f"scores of {name}", missing, ask, config.concurrency, DRAIN_S, stop)
        rows = read_rows(path, Scores, keys)
        return [rows[p.prompt_id] for p in self.prompts]

    def _judge(self, name: str, stop: StopFlag) -> list[Judgement]:
        """Return a judge's verdicts on the first responses of every pair, in both orders; ask for missing ones."""
        llm, path = self.config.judges[name], self.folder / JUDGEMENTS
        answers = {policy: self.answers(policy) for policy in self.config.names}
        requests: dict[str, tuple[Judgement, Question]] = {}
        for first, second in permutations(self.config.names, 2):
            for prompt in self.prompts:
                texts = [answers[policy][prompt.prompt_id].responses[0].text for policy in (first, second)]
                request = question(self.task, prompt.prompt_text, *texts, llm)
                about = {"judge": name, "prompt_id": prompt.prompt_id, "first": first, "second": second}
                key = content_key(about, llm.model, request)
                requests[key] = Judgement(key=key, **about), request

        async def ask(item: tuple[Judgement, Question]) -> Judgement:
            row, request = item
            answer = await self._askers[llm].ask(request)
            return row.model_copy(update=read_verdict(answer.text))

        known = {row.key for row in read_journal(path, Judgement)}
        missing = [item for key, item in requests.items() if key not in known]
        collect(path, f"judge {name}", missing, ask, llm.concurrency, self.config.timeout_s, stop)
        return [row for row in read_journal(path, Judgement) if row.key in requests]

    def _report(self, scores: Mapping[str, Sequence[Scores]], judgements: Sequence[Judgement]) -> dict[str, Any]:
        """Write the report of all policies. scores: policy -> by prompt."""
        config, prompts = self.config, self.prompts
        references = [self.task.reference(p.payload) for p in prompts]
        answers, measured = {}, {}
        for name in config.names:
            rows = self.answers(name)
            answers[name] = [rows[p.prompt_id] for p in prompts]
            measured[name] = columns(answers[name], scores[name], references, config.pass_at)
        sampled = config.rollout.model_dump(include={"samples_per_prompt", "temperature", "max_new_tokens"})
        about = {"task": config.task, "data": config.data.path, "prompts": len(prompts), "seed": config.run.seed}
        judged = win_rates(judgements, answers, seed=config.run.seed)
        summary = summarise(measured, seed=config.run.seed)
        return write_policy_evaluation(self.folder, about | sampled, prompts, answers, measured, summary, judged)


def collect(
    path: Path, title: str, items: Sequence[Item], ask: Ask[Item], at_once: int, patience_s: float, stop: StopFlag
) -> None:
    """Appends what `ask` says of each item to the journal at `path`. RunStopped, after all are asked, where some got no
    answer.

    patience_s: that answers under way have after `stop` is set; then Stopped.
    """
    turns, num_lost = Turns(at_once), 0

    async def one(item: Item) -> None:
        nonlocal num_lost
        async with turns.one() as begins:
            if begins:
                try:
                    journal.append(await ask(item))
                    bar.advance()
                except (ChatFailed, SamplingFailed):
                    num_lost += 1

    with closing(Journal(path)) as journal, stage(title, len(items)) as bar:
        asyncio.run(attended(together(one(item) for item in items), turns, journal.sync, stop, patience_s))
    if num_lost:
        raise RunStopped(f"{title}: {num_lost} of {len(items)} got no answer; the same command asks again")
