"""Scores of responses by a feedback source, in an evaluation of policies: feedback/<policy>.jsonl of its folder.

A row has the judged responses to one prompt, as records with critique and spans. Failed judgements are requested again
by the next start.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jobs.common.cli import StopFlag
from jobs.common.journals import judging_limits, make_missing_rows, read_rows
from t2g.concurrency import gather_all
from t2g.config import FeedbackConfig, PolicyEvaluationJob, loading
from t2g.errors import RunStopped
from t2g.feedback.records import AnnotatedRecord, make_annotated_record
from t2g.feedback.rewards import score_spans
from t2g.interfaces import FeedbackSource
from t2g.runs.contents import model_version, source_hash
from t2g.study.policy_eval import Answers, content_key
from t2g.types import Prompt, SpanFeedback

FOLDER = "feedback"
ServeFeedback = Callable[[], AbstractContextManager[FeedbackSource]]  # its engines live as long as the block
Items = dict[str, tuple[Prompt, list[str]]]  # key of a row -> prompt and responses


class JudgedResponses(BaseModel):
    """The judged responses of a policy to one prompt, by sample_index."""

    prompt_id: str
    key: str  # `content_key` of the feedback source, prompt and responses
    records: tuple[AnnotatedRecord, ...]

    @property
    def is_complete(self) -> bool:
        """Return whether no judgement needs another try."""
        return all(record.status != "failed" for record in self.records)


def feedback_version(config: FeedbackConfig) -> str:
    """Return a key that changes with the settings, functions and models that judge."""
    contents: list[str] = []
    for source in config.named_sources.values():
        functions = [name for name in (source.source, source.align) if name and ":" in name]
        contents += map(source_hash, functions)
        if source.reward_model is not None:
            contents.append(model_version(source.reward_model, source.reward_revision))
    return content_key(loading.identity_values(config), contents)


class FeedbackScores:
    """The judgements of all policies of an evaluation."""

    def __init__(self, config: PolicyEvaluationJob, feedback: FeedbackConfig, folder: Path) -> None:
        self.config = config
        self.feedback = feedback
        self._folder = folder / FOLDER
        self._version = feedback_version(feedback)

    def missing(self, name: str, prompts: Sequence[Prompt], answers: Sequence[Answers]) -> bool:
        """Return whether responses of a policy lack a judgement."""
        rows = read_rows(self._path(name), JudgedResponses)
        complete = {key for key, row in rows.items() if row.is_complete}
        return not self._items(prompts, answers).keys() <= complete

    def judge(
        self,
        name: str,
        prompts: Sequence[Prompt],
        answers: Sequence[Answers],
        source: FeedbackSource | None,
        stop: StopFlag,
    ) -> list[JudgedResponses]:
        """Return the judged responses of a policy by prompt; judge what the journal lacks.

        Args:
            source: None if nothing is `missing`.

        Raises:
            RunStopped: More than feedback.max_failed_share of the responses have no usable feedback.
            Stopped: `stop` was set.
        """

        async def judge_one(prompt: Prompt, text: str) -> SpanFeedback:
            assert source is not None, "responses are missing"
            if text:
                return await source.judge(prompt, text)
            reason = "the response is empty, or ended within its thinking"
            return SpanFeedback(critique="", spans=(), status="empty", source=source.name, version="", reason=reason)

        path = self._path(name)
        earlier = read_rows(path, JudgedResponses)

        async def judge_unless_known(
            prompt: Prompt, text: str, index: int, record: AnnotatedRecord | None
        ) -> AnnotatedRecord:
            """Return the record of an earlier start; judge the response if there is none, or it failed."""
            if record is not None and record.status != "failed":
                return record
            feedback = await judge_one(prompt, text)
            return make_annotated_record(prompt, text, feedback, sample_index=index)

        async def make_row(key: str, item: tuple[Prompt, list[str]]) -> JudgedResponses:
            prompt, texts = item
            known = earlier[key].records if key in earlier else [None] * len(texts)
            works = [judge_unless_known(prompt, text, index, known[index]) for index, text in enumerate(texts)]
            records = await gather_all(works)
            return JudgedResponses(prompt_id=prompt.prompt_id, key=key, records=tuple(records))

        items = self._items(prompts, answers)
        rows_by_key = make_missing_rows(
            path,
            f"feedback on {name}",
            items,
            make_row,
            read=partial(read_rows, path, JudgedResponses),
            limits=judging_limits(self.feedback),
            stop=stop,
            is_final=lambda row: row.is_complete,
        )
        rows = [*rows_by_key.values()]
        self._check_failures(name, rows)
        return rows

    def scores(self, rows: Sequence[JudgedResponses]) -> list[list[float | None]]:
        """Return the score of each response by prompt, None without usable feedback."""
        rules = self.config.rewards
        weights = self.feedback.weights

        def score(record: AnnotatedRecord) -> float | None:
            return score_spans(record.spans, rules, weights) if record.usable else None

        return [list(map(score, row.records)) for row in rows]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def _items(self, prompts: Sequence[Prompt], answers: Sequence[Answers]) -> Items:
        items: Items = {}
        for prompt, row in zip(prompts, answers, strict=True):
            texts = [response.text for response in row.responses]
            key = content_key(self._version, prompt.prompt_id, prompt.prompt_text, prompt.payload, texts)
            items[key] = prompt, texts
        return items

    def _check_failures(self, name: str, rows: Sequence[JudgedResponses]) -> None:
        records = list(chain.from_iterable(row.records for row in rows))
        unusable = [record for record in records if not record.usable]
        limit = self.feedback.max_failed_share
        if len(unusable) > limit * len(records):
            raise RunStopped(
                f"feedback.source={self.feedback.describe()} gave no usable feedback on {len(unusable)} of "
                f"{len(records)} responses of {name} (feedback.max_failed_share={limit:g}): {unusable[0].reason}; the "
                "same command asks for failed judgements again"
            )


def find_feedback(rows: Mapping[str, Sequence[JudgedResponses]]) -> Callable[[Prompt, str], SpanFeedback | None]:
    """Return a function that finds the feedback on a response to a prompt, of any policy."""
    records: dict[Any, AnnotatedRecord] = {}
    for row in chain.from_iterable(rows.values()):
        for record in row.records:
            records[row.prompt_id, record.response] = record

    def find(prompt: Prompt, text: str) -> SpanFeedback | None:
        record = records.get((prompt.prompt_id, text))
        return None if record is None else record.to_feedback()

    return find
