"""Alignment of critiques without spans: another model finds the spans that such a critique is about."""

from dataclasses import replace

from t2g.interfaces import Aligner
from t2g.types import Prompt, SpanFeedback


async def find_spans(aligner: Aligner, prompt: Prompt, response_text: str, own: SpanFeedback) -> SpanFeedback:
    """Return the aligner's spans, status and counts with the critique and source of `own`, and its results, if any.

    The version names both: "facts:judge, judge#5f0c2a91".
    """
    aligned = await aligner.align(prompt, response_text, own.critique)
    versions = filter(None, (own.version, aligned.version))
    return replace(
        aligned,
        critique=own.critique,
        source=own.source,
        version=", ".join(versions),
        execution=own.execution or aligned.execution,
        metrics=own.metrics or aligned.metrics,
    )
