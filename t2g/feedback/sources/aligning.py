"""Alignment of critiques without spans: another model finds the spans that such a critique is about."""

from dataclasses import replace

from t2g.interfaces import Aligner
from t2g.types import Prompt, SpanFeedback


async def find_spans(aligner: Aligner, prompt: Prompt, response_text: str, feedback: SpanFeedback) -> SpanFeedback:
    """Return the aligner's spans, status and counts with critique and source of `feedback`, and its results, if any.

    The version names both: "facts:judge, judge#5f0c2a91".
    """
    aligned = await aligner.align(prompt, response_text, feedback.critique)
    versions = filter(None, (feedback.version, aligned.version))
    return replace(
        aligned,
        critique=feedback.critique,
        source=feedback.source,
        version=", ".join(versions),
        execution=feedback.execution or aligned.execution,
        metrics=feedback.metrics or aligned.metrics,
    )
