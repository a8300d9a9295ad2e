"""Policies on the same prompts: sampled, measured, compared by judges, reported.

Every answer is a line of a journal: responses/<policy>/responses.jsonl, scores/<policy>.jsonl, judgements.jsonl. A job
that was killed asks for the missing ones, and for no other; a policy or a judge may come later. Engines of two policies
never live at one time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
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
from t2g.config import LLMConfig, ModelConfig, PolicyEvaluationJob
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.errors import RunStopped, UserError
from t2g.feedback.sources.asking import Asker, ChatFailed, Completion, Question
from t2g.feedback.sources.endpoint import EndpointChat
from t2g.files import weights_version
from t2g.interfaces import RolloutSource, Sampling
from t2g.loop.annotation import Turns
from t2g.loop.steps import sampling_seed
from t2g.report.policy_page import write_policy_evaluation
from t2g.runs import identity
from t2g.runs.identity import Identity, data_hash
from t2g.runs.journal import Journal, read_journal
from t2g.runs.progress import stage
from t2g.sandbox import available
from t2g.study.pairwise import Judgement, judge_version, question, read_verdict, win_rates
from t2g.study.policy_eval import PASSED, Answers, Scores, answers_of, bert_score, columns, summarise
from t2g.tasks.base import Record, Task, get_task
from t2g.tasks.human_eval import as_kodcode
from t2g.text.positions import check_positions
from t2g.text.tokenizer import load_tokenizer
from t2g.types import Prompt

RESPONSES, SCORES, JUDGEMENTS, MERGED = "responses", "scores", "judgements.jsonl", "merged"
ADAPTER_FILE = "adapter_config.json"
SMOKE_PROMPTS = 3
MAX_SEED = 2**31 - 1  # that every server takes

Item = TypeVar("Item")
Ask = Callable[[Item], Awaitable[BaseModel | None]]
Serve = Callable[[ModelConfig], AbstractContextManager[RolloutSource]]  # engines of a model, as long as the block


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What every policy is asked, in one order."""

    task: Task
    records: Sequence[Record]
    prompts: Sequence[Prompt]  # without anybody's token ids


def read_questions(config: PolicyEvaluationJob) -> Questions:
    """UserError for data that cannot be used, and for a machine that cannot run what is measured."""
    task = get_task(config.task)
    records: Sequence[Record] = load_records(config.data)[: SMOKE_PROMPTS if config.run.smoke else None]
    if task.score_name == PASSED:
        records = as_kodcode(records)
        if lacking := available(config.sandbox.require):
            raise UserError(lacking)
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
    return Questions(task=task, records=records, prompts=prompts)


class Evaluation:
    """One evaluation in its run folder, which it begins. UserError for what cannot be asked: a model, a prompt that is
    too long, a server without a key, a folder with responses of something else.

    The methods add to the journals what they lack. Each may raise Stopped, and RunStopped when a server left questions
    without an answer, once the others are answered.
    """

    def __init__(self, config: PolicyEvaluationJob, questions: Questions) -> None:
        self.config, self.questions, self.task = config, questions, questions.task
        self.folder = begin_folder(config, RESPONSES)
        (self.folder / SCORES).mkdir(exist_ok=True)
        self.stop = StopFlag()
        servers = [*config.endpoints.values(), *config.judges.values()]
        self._askers = {llm: Asker(EndpointChat(llm), llm, config.timeout_s) for llm in servers}
        for name in config.names:
            self._claim(name)
        self._models = {name: self._model(name) for name in config.policies}
        self._own_prompts = {name: self._encoded(model) for name, model in self._models.items()}

    def _claim(self, name: str) -> None:
        """The folder of a policy's responses is this policy's, and these prompts'."""
        at, model = self.folder / RESPONSES / name, self.config.policies.get(name)
        made_of = Identity.of(
            self.config,
            weights=weights_version(model.policy, model.revision) if model else "",
            data=data_hash((prompt.prompt_id, prompt.prompt_text) for prompt in self.questions.prompts),
            model=model.policy if model else self.config.endpoints[name].model,
        )
        if at.exists():
            identity.check(at, made_of)
        identity.keep(at, made_of)

    def _model(self, name: str) -> ModelConfig:
        """What engines load: an adapter is merged into its base first."""
        model, merged = self.config.policies[name], self.folder / MERGED / name
        if not (Path(model.policy) / ADAPTER_FILE).exists():
            return model
        if not merged.exists():
            from actors.learner.lora import merge_adapter

            merge_adapter(Path(model.policy), merged, self.config.rollout.dtype)
        return ModelConfig(policy=str(merged))

    def _encoded(self, model: ModelConfig) -> Sequence[Prompt]:
        """The prompts with the token ids of the model's own tokenizer and chat template."""
        rollout = self.config.rollout
        check_positions(model.policy, model.revision, "rollout.max_model_len", rollout.max_model_len)
        tokenizer = load_tokenizer(model.policy, model.revision)
        return make_prompts(self.questions.records, self.task, tokenizer, rollout.max_prompt_tokens)

    # ------------------------------------------------------------------------------------------------------- journals
    def _path(self, name: str) -> Path:
        return self.folder / RESPONSES / name / "responses.jsonl"

    def answers(self, name: str) -> dict[str, Answers]:
        return {row.prompt_id: row for row in read_journal(self._path(name), Answers)}

    def scores(self, name: str) -> dict[str, Scores]:
        return {row.prompt_id: row for row in read_journal(self.folder / SCORES / f"{name}.jsonl", Scores)}

    def judgements(self) -> list[Judgement]:
        """Of the judges as they are asked now."""
        versions = {name: judge_version(self.task, llm) for name, llm in self.config.judges.items()}
        rows = read_journal(self.folder / JUDGEMENTS, Judgement)
        return [row for row in rows if versions.get(row.judge) == row.version]

    def _collect(
        self, path: Path, title: str, items: Sequence[Item], ask: Ask[Item], at_once: int, patience_s: float = DRAIN_S
    ) -> None:
        """Appends what `ask` says of each item. None is no answer."""
        turns, num_lost = Turns(at_once), 0

        async def one(item: Item) -> None:
            nonlocal num_lost
            async with turns.one() as begins:
                line = await ask(item) if begins else None
                num_lost += begins and line is None
                if line is not None:
                    journal.append(line)
                    bar.advance()

        with closing(Journal(path)) as journal, stage(title, len(items)) as bar:
            work = together(one(item) for item in items)
            asyncio.run(attended(work, turns, journal.sync, self.stop, patience_s))
        if num_lost:
            raise RunStopped(f"{title}: {num_lost} of {len(items)} got no answer; the same command asks again")

    async def _answer(self, llm: LLMConfig, question: Question) -> Completion | None:
        asker = self._askers[llm]
        async with asker.turn():
            try:
                return await asker.complete(question)
            except ChatFailed as error:
                return asker.failed(error)

    # ------------------------------------------------------------------------------------------------------- responses
    def missing(self, name: str) -> list[int]:
        """Places of the prompts without responses of this policy."""
        known = self.answers(name)
        return [place for place, prompt in enumerate(self.questions.prompts) if prompt.prompt_id not in known]

    def sample(self, name: str, source: RolloutSource | None) -> None:
        """The responses of one policy. source: its engines; None: it is behind a server."""
        rollout, places = self.config.rollout, self.missing(name)
        seed = sampling_seed(self.config.run.seed, "eval", 0)  # as the held-out samples of a training

        async def from_engines(place: int) -> Answers:
            sampling = Sampling(
                num_samples=rollout.samples_per_prompt,
                temperature=rollout.temperature,
                max_new_tokens=rollout.max_new_tokens,
                seed=seed,
            )
            rollouts = await source.sample(self._own_prompts[name][place], sampling)
            return answers_of(rollouts[0].prompt_id, [(r.response_text, r.finish_reason) for r in rollouts])

        async def from_server(place: int) -> Answers | None:
            prompt, llm = self.questions.prompts[place], self.config.endpoints[name]
            asked = [
                Question(
                    messages=self.task.policy_messages(self.questions.records[place]),
                    schema={},
                    max_output_tokens=rollout.max_new_tokens,
                    temperature=rollout.temperature,
                    seed=sample_seed(seed, prompt.prompt_id, index) & MAX_SEED,
                )
                for index in range(rollout.samples_per_prompt)
            ]
            given = await together(self._answer(llm, one) for one in asked)
            if None in given:
                return None
            return answers_of(prompt.prompt_id, [(one.text, one.finish_reason) for one in given])

        path, title = self._path(name), f"responses of {name}"
        if source:
            self._collect(path, title, places, from_engines, 2 * rollout.workers.max * rollout.max_num_seqs)
        else:
            llm = self.config.endpoints[name]
            self._collect(path, title, places, from_server, llm.concurrency, self.config.timeout_s)

    # ---------------------------------------------------------------------------------------------- scores, judgements
    def score(self, name: str) -> None:
        """What the task measures of the responses."""
        answers, known, config = self.answers(name), self.scores(name), self.config
        missing = [prompt for prompt in self.questions.prompts if prompt.prompt_id not in known]

        def measured(prompt: Prompt) -> Scores:
            texts = [response.text for response in answers[prompt.prompt_id].responses]
            scores = [self.task.measure(prompt, text, sandbox=config.sandbox) or {} for text in texts]
            if config.bertscore:
                reference = self.task.reference(prompt.payload) or ""
                found = [bert_score(text, reference, config.bertscore, config.bertscore_layer) for text in texts]
                scores = [one | {"bertscore": value} for one, value in zip(scores, found, strict=True)]
            return Scores(prompt_id=prompt.prompt_id, scores=tuple(scores))

        path = self.folder / SCORES / f"{name}.jsonl"
        self._collect(path, f"scores of {name}", missing, partial(asyncio.to_thread, measured), config.concurrency)

    def judge(self, name: str) -> None:
        """What one judge says of the first responses of every pair, in both orders."""
        llm, said = self.config.judges[name], {policy: self.answers(policy) for policy in self.config.names}
        known, version = {row.key for row in self.judgements()}, judge_version(self.task, llm)
        asked = [
            (prompt, Judgement(judge=name, version=version, prompt_id=prompt.prompt_id, first=first, second=second))
            for first, second in permutations(self.config.names, 2)
            for prompt in self.questions.prompts
        ]

        async def ask(item: tuple[Prompt, Judgement]) -> Judgement | None:
            prompt, row = item
            texts = [said[policy][row.prompt_id].responses[0].text for policy in (row.first, row.second)]
            answer = await self._answer(llm, question(self.task, prompt.prompt_text, *texts, llm))
            return row.model_copy(update=read_verdict(answer.text)) if answer else None

        missing = [item for item in asked if item[1].key not in known]
        path = self.folder / JUDGEMENTS
        self._collect(path, f"judge {name}", missing, ask, llm.concurrency, self.config.timeout_s)

    # ----------------------------------------------------------------------------------------------------- all of them
    def run(self, serve: Serve, stop: StopFlag) -> dict[str, Any]:
        """All that is missing, then the report; returns what evaluation.json holds.

        serve: asked for one policy after the other, for those alone that lack responses.
        """
        self.stop = stop
        for name in filter(self.missing, self.config.names):
            with serve(self._models[name]) if name in self._models else nullcontext() as source:
                self.sample(name, source)
        for name in self.config.names:
            self.score(name)
        for name in self.config.judges:
            self.judge(name)
        return self.report()

    def report(self) -> dict[str, Any]:
        config, prompts = self.config, self.questions.prompts
        ids, references = [p.prompt_id for p in prompts], [self.task.reference(p.payload) for p in prompts]
        answers, measured = {}, {}
        for name in config.names:
            said, scores = self.answers(name), self.scores(name)
            answers[name] = [said[prompt_id] for prompt_id in ids]
            measured[name] = columns(answers[name], [scores[i] for i in ids], references, config.pass_at)
        words = {name: [len(row.responses[0].text.split()) for row in rows] for name, rows in answers.items()}
        about = {
            "task": config.task,
            "data": config.data.path,
            "prompts": len(ids),
            "samples_of_a_prompt": config.rollout.samples_per_prompt,
            "temperature": config.rollout.temperature,
            "seed": config.run.seed,
        }
        judged = win_rates(self.judgements(), config.names, words, ids, seed=config.run.seed)
        summary = summarise(measured, seed=config.run.seed)
        return write_policy_evaluation(self.folder, about, prompts, answers, measured, summary, judged)
