"""Write the results of a policy evaluation: evaluation.json, .md and .html, and exports. Computes no figures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t2g.config.jobs import EVALUATION_FILE
from t2g.files import write_atomic, write_json
from t2g.report.reward_page import HTML_FILE
from t2g.report.templates import number, render_page
from t2g.runs.versions import collect_versions
from t2g.study.policy_eval import BLEU, Answers, Columns, bleu_signature, general_measures, has_only_ties
from t2g.study.tables import format_figure, markdown
from t2g.types import Prompt, SpanFeedback

MD_FILE = "evaluation.md"
EXPORTS = "exports"
NUM_EXAMPLES = 6
ONLY_TIES = "Every pair ties on every prompt: take harder prompts, or another rollout.temperature."
PROBLEMS = {"empty": 1.0, "truncated": 1.0, "repetition": 0.5}  # measure -> value of a response that is a problem


def write_policy_evaluation(
    folder: Path,
    about: Mapping[str, Any],
    prompts: Sequence[Prompt],
    answers: Mapping[str, Sequence[Answers]],
    measured: Mapping[str, Columns],
    summary: Mapping[str, Any],
    judged: Mapping[str, Any],
    judge: Callable[[Prompt, str], SpanFeedback | None],
) -> dict[str, Any]:
    """Write all files into `folder`.

    Args:
        about: What was evaluated, plain values.
        answers: policy -> responses by prompt.
        measured: policy -> measures by prompt.
        summary: Result of `policy_eval.summarize`.
        judged: Result of `pairwise.win_rates`.
        judge: Returns the feedback that the examples show with their spans, or None.

    Returns:
        The content of evaluation.json.
    """
    names = [*summary["policies"]]
    measures = [*summary["policies"][names[0]]]
    result = {
        **about,
        **summary,
        "judged": judged,
        "warning": ONLY_TIES if has_only_ties(summary, judged) else None,
        "problems": _problems(answers),
        "examples": _examples(measured, measures[0]),
        "bleu_signature": bleu_signature() if BLEU in measures else None,
        "versions": collect_versions(),
    }
    write_json(folder / EVALUATION_FILE, result)
    write_atomic(folder / MD_FILE, _markdown(result, measures).encode())
    render_page(
        folder / HTML_FILE,
        "policy.html",
        title="Policies compared",
        about=about,
        result=result,
        names=names,
        measures=measures,
        prompts=prompts,
        answers=answers,
        measured=measured,
        judge=judge,
        versions=result["versions"],
    )
    _export(folder / EXPORTS, prompts, answers)
    return result


def _examples(measured: Mapping[str, Columns], measure: str) -> list[int]:
    """Return the indices of the prompts on which the policies differ most."""
    values = np.hstack([columns[measure] for columns in measured.values()])  # [N, policies]
    difference = np.ptp(values, axis=1)
    order = np.argsort(-difference, kind="stable")
    return order[:NUM_EXAMPLES].tolist()


def _problems(answers: Mapping[str, Sequence[Answers]]) -> dict[str, Any]:
    """Return the number of responses with each problem, and examples: [policy, index of the prompt, sample]."""
    places: dict[str, list[tuple[str, int, int]]] = {kind: [] for kind in PROBLEMS}
    for policy, rows in answers.items():
        for row_index, row in enumerate(rows):
            for sample, response in enumerate(row.responses):
                measures = general_measures(response)
                for kind, least in PROBLEMS.items():
                    if measures[kind] >= least:
                        places[kind].append((policy, row_index, sample))
    problems: dict[str, Any] = {}
    for kind, of_kind in places.items():
        problems[kind] = {"count": len(of_kind), "examples": of_kind[:NUM_EXAMPLES]}
    return problems


def _markdown(result: Mapping[str, Any], measures: Sequence[str]) -> str:
    def format_interval(value: Mapping[str, float]) -> str:
        ends = f"{number(value['low'])} to {number(value['high'])}"
        return f"{number(value['value'])} ({ends})"

    policy_rows = []
    for name, figures in result["policies"].items():
        policy_rows.append([name, *map(format_interval, figures.values())])
    pair_rows = []
    for pair in result["pairs"]:
        row = [pair["policy"], pair["against"], pair["measure"], format_interval(pair)]
        row += [format_figure(pair[key], ".4f") for key in ("p", "p_holm")]
        row += [number(pair[key]) for key in ("wins", "ties", "losses", "resolvable")]
        pair_rows.append(row)

    head = ["policy", "against", "measure", "difference", "p", "Holm", "wins", "ties", "losses", "resolvable"]
    policy_table = markdown(["policy", *measures], policy_rows)
    pair_table = markdown(head, pair_rows)
    tables = f"{policy_table}\n\n{pair_table}\n"
    if result["warning"]:
        return f"{result['warning']}\n\n{tables}"
    return tables


def _export(folder: Path, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Answers]]) -> None:
    """Write the first responses of each policy in the format of AlpacaEval."""
    folder.mkdir(exist_ok=True)
    for name, rows in answers.items():
        outputs = []
        for prompt, row in zip(prompts, rows, strict=True):
            output = row.responses[0].text
            outputs.append({"instruction": prompt.prompt_text, "output": output, "generator": name})
        write_json(folder / f"alpaca_eval_{name}.json", outputs)
