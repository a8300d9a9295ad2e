"""Several feedback sources that judge each response, one for each criterion; their spans and critiques are joined."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace

from t2g.concurrency import gather_all
from t2g.config import FeedbackConfig, SourceConfig
from t2g.interfaces import FeedbackSource
from t2g.types import CriterionResult, Prompt, Span, SpanFeedback


def make_source(config: FeedbackConfig, make: Callable[[SourceConfig, str], FeedbackSource]) -> FeedbackSource:
    """Return the source of a section, or the combination of its sources.

    Args:
        make: Makes a source from its settings and their key, for messages.
    """
    if config.sources is None:
        return make(config, config.section)
    made = {name: make(source, f"{config.section}.sources.{name}") for name, source in config.sources.items()}
    return CombinedFeedback(made, [name for name, source in config.sources.items() if source.required])


class CombinedFeedback(FeedbackSource):
    """The judgements of several sources, which run concurrently."""

    def __init__(self, sources: Mapping[str, FeedbackSource], required: Collection[str]) -> None:
        self._sources, self._required = sources, required
        self.name = "+".join(dict.fromkeys(source.name for source in sources.values()))
        self.fleet = next((source.fleet for source in sources.values() if source.fleet), None)

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        return await self.combine(lambda _name, source: source.judge(prompt, response_text))

    async def combine(self, judge: Callable[[str, FeedbackSource], Awaitable[SpanFeedback]]) -> SpanFeedback:
        """Return the combination of `judge(criterion, source)` of each source."""
        answers = await gather_all(judge(name, source) for name, source in self._sources.items())
        return combine_feedback(dict(zip(self._sources, answers, strict=True)), self._required)


def combine_feedback(
    answers: Mapping[str, SpanFeedback], required: Collection[str], *, names_single: bool = False
) -> SpanFeedback:
    """Return one feedback from the feedback of each criterion, with the critiques under the names as headings.

    It is usable if at least one criterion is usable and every required one is. Otherwise it is failed if a required
    criterion failed (any, if none is required), else unparsable. Spans and critiques of unusable criteria are left out.
    The execution is the first one. A single criterion only names its spans: it has no heading, `criteria` or curves,
    except with `names_single`.
    """
    critique, spans, results = "", list[Span](), dict[str, CriterionResult]()
    is_named = names_single or len(answers) > 1
    for name, answer in answers.items():
        if answer.usable and answer.critique and is_named:
            critique += ("\n\n" if critique else "") + f"{name}:\n"
        start = len(critique)
        if answer.usable:
            critique += answer.critique
            spans += [_name_span(span, name, start) for span in answer.spans]
        critique_range = start, len(critique)
        results[name] = CriterionResult(status=answer.status, critique_range=critique_range, reason=answer.reason)
    if not is_named:
        return replace(next(iter(answers.values())), spans=tuple(spans))
    usable = [answer for answer in answers.values() if answer.usable]
    needed = [answer for name, answer in answers.items() if name in required] or usable or [*answers.values()]
    status = "ok" if spans else "empty"
    if unusable := [answer.status for answer in needed if not answer.usable]:
        status = "failed" if "failed" in unusable else "unparsable"
    agreements = [answer.agreement for answer in usable if answer.agreement is not None]
    return SpanFeedback(
        critique=critique,
        spans=tuple(spans),
        status=status,
        source="+".join(dict.fromkeys(answer.source for answer in answers.values())),
        version="; ".join(f"{name}: {answer.version}" for name, answer in answers.items()),
        num_quotes=sum(answer.num_quotes for answer in answers.values()),
        num_located=sum(answer.num_located for answer in answers.values()),
        execution=next((answer.execution for answer in usable if answer.execution), {}),
        agreement=sum(agreements) / len(agreements) if agreements else None,
        reason="; ".join(f"{name}: {answer.reason}" for name, answer in answers.items() if answer.reason),
        metrics={f"{name}/{key}": value for name, answer in answers.items() for key, value in answer.metrics.items()},
        criteria=results,
    )


def _name_span(span: Span, criterion: str, offset: int) -> Span:
    """Return the span with its criterion, and its part of the critique moved by `offset` characters."""
    critique_range = span.critique_range and (span.critique_range[0] + offset, span.critique_range[1] + offset)
    return replace(span, criterion=criterion, critique_range=critique_range)
