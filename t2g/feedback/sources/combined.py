"""Several feedback sources that judge each response, one for each criterion; their spans and critiques are joined."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from t2g.concurrency import gather_all
from t2g.config import FeedbackConfig, SourceConfig
from t2g.interfaces import FeedbackSource
from t2g.types import CriterionResult, FeedbackStatus, Prompt, Span, SpanFeedback


def make_source(config: FeedbackConfig, make: Callable[[SourceConfig, str], FeedbackSource]) -> FeedbackSource:
    """Return the source of a section, or the combination of its sources.

    Args:
        make: Makes a source from its settings and their key, for messages.
    """
    if config.sources is None:
        return make(config, config.section)
    sources: dict[str, FeedbackSource] = {}
    required: list[str] = []
    for name, source in config.sources.items():
        sources[name] = make(source, f"{config.section}.sources.{name}")
        if source.required:
            required.append(name)
    return CombinedFeedback(sources, required)


class CombinedFeedback(FeedbackSource):
    """The judgements of several sources, which run concurrently."""

    def __init__(self, sources: Mapping[str, FeedbackSource], required: Collection[str]) -> None:
        self._sources = sources
        self._required = required
        names = [source.name for source in sources.values()]
        self.name = "+".join(dict.fromkeys(names))
        self.fleet = next((source.fleet for source in sources.values() if source.fleet), None)

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        return await self.combine(lambda _name, source: source.judge(prompt, response_text))

    async def combine(self, judge: Callable[[str, FeedbackSource], Awaitable[SpanFeedback]]) -> SpanFeedback:
        """Return the combination of `judge(criterion, source)` of each source."""
        answers = await gather_all(judge(name, source) for name, source in self._sources.items())
        by_criterion = dict(zip(self._sources, answers, strict=True))
        return combine_feedback(by_criterion, self._required)


def combine_feedback(
    answers: Mapping[str, SpanFeedback], required: Collection[str], *, names_single: bool = False
) -> SpanFeedback:
    """Return one feedback from the feedback of each criterion, with the critiques under the names as headings.

    It is usable if at least one criterion is usable and every required one is. Otherwise it is failed if a required
    criterion failed (any, if none is required), else unparsable. Spans and critiques of unusable criteria are left out.
    The execution is the first one. A single criterion only names its spans: without `names_single` it has no heading,
    no entry in `criteria` and no metrics of its own.
    """
    is_named = names_single or len(answers) > 1
    joined = _join_critiques(answers, with_headings=is_named)
    if not is_named:
        single = next(iter(answers.values()))
        return replace(single, spans=joined.spans)

    versions: list[str] = []
    reasons: list[str] = []
    metrics: dict[str, float] = {}
    sources: dict[str, None] = {}
    num_quotes = 0
    num_located = 0
    for name, answer in answers.items():
        sources[answer.source] = None
        versions.append(f"{name}: {answer.version}")
        if answer.reason:
            reasons.append(f"{name}: {answer.reason}")
        metrics |= {f"{name}/{key}": value for key, value in answer.metrics.items()}
        num_quotes += answer.num_quotes
        num_located += answer.num_located

    usable = [answer for answer in answers.values() if answer.usable]
    execution = next((answer.execution for answer in usable if answer.execution), {})
    status = _combine_status(answers, required, joined.spans)
    agreement = _mean_agreement(usable)
    return SpanFeedback(
        critique=joined.critique,
        spans=joined.spans,
        status=status,
        source="+".join(sources),
        version="; ".join(versions),
        num_quotes=num_quotes,
        num_located=num_located,
        execution=execution,
        agreement=agreement,
        reason="; ".join(reasons),
        metrics=metrics,
        criteria=joined.results,
    )


class _JoinedCritique(NamedTuple):
    """The critiques and spans of the usable criteria, and the results of all."""

    critique: str
    spans: tuple[Span, ...]
    results: dict[str, CriterionResult]


def _join_critiques(answers: Mapping[str, SpanFeedback], *, with_headings: bool) -> _JoinedCritique:
    critique = ""
    spans: list[Span] = []
    results: dict[str, CriterionResult] = {}
    for name, answer in answers.items():
        if answer.usable and answer.critique and with_headings:
            if critique:
                critique += "\n\n"
            critique += f"{name}:\n"
        start = len(critique)
        if answer.usable:
            critique += answer.critique
            spans += [_name_span(span, name, start) for span in answer.spans]
        critique_range = (start, len(critique))
        results[name] = CriterionResult(status=answer.status, critique_range=critique_range, reason=answer.reason)
    return _JoinedCritique(critique, tuple(spans), results)


def _combine_status(
    answers: Mapping[str, SpanFeedback], required: Collection[str], spans: Collection[Span]
) -> FeedbackStatus:
    needed = [answer for name, answer in answers.items() if name in required]
    if not needed:
        usable = [answer for answer in answers.values() if answer.usable]
        needed = usable or [*answers.values()]
    unusable = [answer.status for answer in needed if not answer.usable]
    if "failed" in unusable:
        return "failed"
    if unusable:
        return "unparsable"
    return "ok" if spans else "empty"


def _mean_agreement(answers: Collection[SpanFeedback]) -> float | None:
    agreements = [answer.agreement for answer in answers if answer.agreement is not None]
    if not agreements:
        return None
    return sum(agreements) / len(agreements)


def _name_span(span: Span, criterion: str, offset: int) -> Span:
    """Return the span with its criterion, and its part of the critique moved by `offset` characters."""
    if not span.critique_range:
        return replace(span, criterion=criterion)
    start, end = span.critique_range
    return replace(span, criterion=criterion, critique_range=(start + offset, end + offset))
