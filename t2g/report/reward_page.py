"""Write the results of a reward model evaluation: evaluation.json and evaluation.html. Computes no figures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from t2g.config.jobs import EVALUATION_FILE
from t2g.feedback.records import AnnotatedRecord
from t2g.files import write_json
from t2g.report.templates import render_page
from t2g.runs.versions import collect_versions
from t2g.study import reward_eval

HTML_FILE = "evaluation.html"


def write_evaluation(
    folder: Path,
    *,
    about: Mapping[str, Any],
    records: Sequence[AnnotatedRecord],
    judged: Sequence[reward_eval.JudgedRecord],
    seed: int,
) -> dict[str, Any]:
    """Write both files into `folder`.

    Args:
        about: What was evaluated, plain values.
        judged: `records`, judged, in the same order.
        seed: Seed of the resamples.

    Returns:
        The content of evaluation.json.
    """
    prompt_ids = [record.prompt_id for record in records]
    errors = reward_eval.find_errors(judged)
    metrics = reward_eval.reward_metrics(judged)
    errors_json = {kind: _errors_json(of_kind, records, judged) for kind, of_kind in errors.items()}
    result = {
        **about,
        "warning": reward_eval.parse_warning(metrics),
        "metrics": metrics,
        "intervals": reward_eval.bootstrap_intervals(judged, prompt_ids, seed=seed),
        "num_resamples": reward_eval.NUM_RESAMPLES,
        "token_confusion": reward_eval.token_confusion(judged),
        "errors": errors_json,
        "versions": collect_versions(),
    }
    write_json(folder / EVALUATION_FILE, result)
    render_page(
        folder / HTML_FILE,
        "reward.html",
        title="Span reward model",
        about=about,
        result=result,
        labels=list(reward_eval.LABELS),
        errors=errors,
        kinds=reward_eval.ERROR_KINDS,
        records=records,
        judged=judged,
        versions=result["versions"],
    )
    return result


def _errors_json(
    errors: reward_eval.Errors, records: Sequence[AnnotatedRecord], judged: Sequence[reward_eval.JudgedRecord]
) -> dict[str, Any]:
    examples = []
    for index, texts in errors.examples:
        record = records[index]
        judged_record = judged[index]
        example = {
            "prompt_id": record.prompt_id,
            "sample_index": record.sample_index,
            "what": texts,
            "response": judged_record.response,
            "gold": asdict(judged_record.gold),
            "model": asdict(judged_record.feedback),
        }
        examples.append(example)
    return {"count": errors.count, "num_records": errors.num_records, "examples": examples}
