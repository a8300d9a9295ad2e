"""What an evaluation of a span reward model leaves: evaluation.json and evaluation.html. Computes nothing itself."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t2g.feedback.records import AnnotatedRecord
from t2g.files import write_atomic
from t2g.report.html import Answer
from t2g.report.segments import printable
from t2g.report.templates import render_page
from t2g.study import reward_eval
from t2g.types import SpanFeedback

JSON_FILE, HTML_FILE = "evaluation.json", "evaluation.html"
MAX_WHAT_CHARS = 200
OF_A_LABEL = {  # metric without its label -> what it is
    "precision": "of the tokens that the model calls so, those that are",
    "recall": "of the tokens that are so, those that the model finds",
    "f1": "harmonic mean of the two",
    "span_exact_f1": "spans with the same first and last character",
    "span_overlap_f1": "spans that share a character, each with one other",
}
OF_ALL = {
    "kappa": "Cohen's kappa of model and records over good, poor and unlabelled tokens; 0 is chance",
    "located_rate": "quotes of the model that stand in the response",
    "usable_rate": "answers that could be used, as the model is served",
    "parse_rate": "answers that parse without guided decoding",
    "agreement": "between the annotators of a record, over the records that have several",
}


def write_evaluation(
    folder: Path,
    *,
    about: Mapping[str, Any],
    versions: Mapping[str, str],
    records: Sequence[AnnotatedRecord],
    judged: Sequence[reward_eval.JudgedRecord],
    seed: int,
) -> dict[str, Any]:
    """Both files into `folder`; returns what evaluation.json holds.

    about: whose evaluation this is, plain values. judged: of `records`, in their order. seed: of the resamples.
    """
    errors = reward_eval.find_errors(judged)
    result = {
        **about,
        "metrics": reward_eval.reward_metrics(judged),
        "intervals": reward_eval.bootstrap_intervals(judged, seed=seed),
        "num_resamples": reward_eval.NUM_RESAMPLES,
        "token_confusion": reward_eval.token_confusion(judged),
        "errors": {kind: _errors_json(found, records, judged) for kind, found in errors.items()},
        "versions": dict(versions),
    }
    write_atomic(folder / JSON_FILE, json.dumps(result, indent=1).encode())
    metrics, intervals = result["metrics"], result["intervals"]
    render_page(
        folder / HTML_FILE,
        "reward.html",
        title="Span reward model",
        about={name: printable(str(value)) for name, value in about.items()},
        metrics=metrics,
        intervals=intervals,
        labels=list(reward_eval.LABELS),
        num_resamples=reward_eval.NUM_RESAMPLES,
        of_labels=_rows(metrics, intervals, OF_A_LABEL, [f"{name}_" for name in reward_eval.LABELS]),
        of_all=[row for row in _rows(metrics, intervals, OF_ALL, [""]) if row["cells"][0][0] is not None],
        confusion=result["token_confusion"],
        errors=[
            (kind.replace("_", " "), reward_eval.ERROR_KINDS[kind], found, _shown(found, records, judged))
            for kind, found in errors.items()
        ],
        versions=versions,
    )
    return result


def _errors_json(
    errors: reward_eval.Errors, records: Sequence[AnnotatedRecord], judged: Sequence[reward_eval.JudgedRecord]
) -> dict[str, Any]:
    return {
        "count": errors.count,
        "num_records": errors.num_records,
        "examples": [
            {
                "prompt_id": records[example.index].prompt_id,
                "sample_index": records[example.index].sample_index,
                "what": list(example.what),
                "response": judged[example.index].response,
                "gold": _feedback_json(judged[example.index].gold),
                "model": _feedback_json(judged[example.index].feedback),
            }
            for example in errors.examples
        ],
    }


def _feedback_json(feedback: SpanFeedback) -> dict[str, Any]:
    spans = [{"start": s.start, "end": s.end, "label": s.label, "severity": s.severity} for s in feedback.spans]
    return {"status": feedback.status, "critique": feedback.critique, "spans": spans}


def _rows(
    metrics: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]],
    meanings: Mapping[str, str],
    prefixes: Sequence[str],
) -> list[dict[str, Any]]:
    """Ratios with their intervals, or counts without, ready for the template."""
    return [
        {
            "name": name.replace("_", " "),
            "meaning": meaning,
            "cells": [(metrics.get(prefix + name), intervals.get(prefix + name)) for prefix in prefixes],
        }
        for name, meaning in meanings.items()
    ]


def _shown(
    errors: reward_eval.Errors, records: Sequence[AnnotatedRecord], judged: Sequence[reward_eval.JudgedRecord]
) -> list[dict[str, Any]]:
    """Examples of an error, ready for the template."""
    return [
        {
            "what": printable(" | ".join(example.what)[:MAX_WHAT_CHARS]),
            "prompt": records[example.index].prompt,
            "gold": Answer("Gold", one.response, one.gold),
            "model": Answer("Reward model", one.response, one.feedback),
        }
        for example in errors.examples
        for one in [judged[example.index]]
    ]
