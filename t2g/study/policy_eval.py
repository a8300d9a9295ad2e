"""Measure the responses of policies, and compare policies on the same prompts.

A measure has K numbers for each prompt, [N, K], summed or averaged over the prompt's samples. Its statistic is computed
from their sums over prompts: a mean (K = 1), or corpus BLEU (K = 10). Statistics of texts and BLEU are computed here.
ROUGE, facts and tests come from `Task.measure`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import xxhash
from pydantic import AliasChoices, BaseModel, Field
from pydantic_core import to_json

from t2g.study.paired import Draws, Statistic, compare, holm, make_mean, with_interval

BLEU = "bleu"
PASSED = "passed"
REFERENCED = "rougeL"  # a task with this measure has references, so BLEU is computed as well
NGRAM = 4  # length of a repeated n-gram (Welleck et al., arXiv 1908.04319)
GENERAL = ("words", "truncated", "empty", "repetition")
FEEDBACK = "feedback"  # score by a feedback source
UNJUDGED = "unjudged"  # share of responses that the feedback source did not judge
UNTESTED = (*GENERAL, UNJUDGED)  # reported without a test: neither direction is better

Columns = Mapping[str, np.ndarray]  # measure -> [N, K]


class Response(BaseModel):
    text: str
    truncated: bool = Field(validation_alias=AliasChoices("truncated", "cut"))  # cut: in earlier run folders


class Answers(BaseModel):
    """A policy's responses to one prompt, by sample_index."""

    prompt_id: str
    key: str  # `content_key` of weights and prompt
    responses: tuple[Response, ...]


class Scores(BaseModel):
    """The task's measures of the responses of an `Answers`, in the same order."""

    prompt_id: str
    key: str  # `content_key` of measure, prompt with references and tests, and responses
    scores: tuple[dict[str, float], ...]


def content_key(*content: Any) -> str:
    """Return a hash of plain values, models and dataclasses. Equal content has the same key in every run."""
    return xxhash.xxh3_128_hexdigest(to_json(content, inf_nan_mode="constants", serialize_unknown=True))


def general_measures(response: Response) -> dict[str, float]:
    """Return the measures GENERAL of a response.

    >>> general_measures(Response(text="no no no no no", truncated=False))
    {'words': 5.0, 'truncated': 0.0, 'empty': 0.0, 'repetition': 0.5}
    """
    words = response.text.split()
    num_ngrams = len(words) - NGRAM + 1
    ngrams = [tuple(words[start : start + NGRAM]) for start in range(num_ngrams)]
    repetition = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
    return {
        "words": float(len(words)),
        "truncated": float(response.truncated),
        "empty": float(not words),
        "repetition": repetition,
    }


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """Return the unbiased estimate of pass@k from num_samples >= k samples.

    1 - C(n - c, k) / C(n, k), Chen et al., arXiv 2107.03374, equation 1.

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(2, 4, 3)
    (0.25, 0.5, 1.0)
    """
    return 1 - comb(num_samples - num_passed, k) / comb(num_samples, k)


@cache
def _bleu() -> Any:
    from sacrebleu import metrics

    return metrics.BLEU()


def bleu_counts(text: str, reference: str) -> np.ndarray:
    """Return the counts of one response that corpus BLEU needs. -> [10]

    Matched n-grams for n = 1 to 4, all n-grams for n = 1 to 4, response length, reference length.
    """
    score = _bleu().corpus_score([text], [[reference]])
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], float)


def bleu(sums: np.ndarray) -> np.ndarray:
    """Return corpus BLEU, 0 to 100, from summed counts, [..., 10] -> [...]; equal to sacrebleu's score of the texts."""
    scores: list[float] = []
    for row in np.rint(sums.reshape(-1, 10)).astype(int).tolist():
        matched = row[:4]
        totals = row[4:8]
        lengths = row[8:]
        result = _bleu().compute_bleu(matched, totals, *lengths, smooth_method="exp")
        scores.append(result.score)
    return np.array(scores).reshape(sums.shape[:-1])


def bleu_signature() -> str:
    """Return sacrebleu's signature, to be reported with every BLEU score."""
    _bleu().corpus_score([""], [[""]])
    return str(_bleu().get_signature())


@cache
def _bert_scorer(folder: str, layer: int) -> Any:
    from bert_score import BERTScorer

    return BERTScorer(model_type=folder, num_layers=layer)


def bert_score(text: str, reference: str, folder: str, layer: int) -> float:
    """Return BERTScore F1 (Zhang et al., arXiv 1904.09675), or 0 for a blank text, which the package refuses."""
    if not (text.strip() and reference.strip()):
        return 0.0
    _, _, f1 = _bert_scorer(folder, layer).score([text], [reference])
    return float(f1[0])


def make_statistic(measure: str, num_prompts: int) -> Statistic:
    return bleu if measure == BLEU else make_mean(num_prompts)


def columns(
    rows: Sequence[Answers], scores: Sequence[Scores], references: Sequence[str | None], ks: Sequence[int]
) -> dict[str, np.ndarray]:
    """Return all measures of one policy, the task's own first.

    Args:
        rows: Responses by prompt.
        scores: The task's measures by prompt.
        references: By prompt.
        ks: The k of pass@k.
    """
    measures: dict[str, np.ndarray] = {}
    for name in scores[0].scores[0]:
        values = np.array([_sample_values(row, name) for row in scores])  # [N, S]
        if name == PASSED:
            measures |= _pass_at_columns(values, ks)
        else:
            measures[name] = values.mean(1, keepdims=True)
    if REFERENCED in measures:
        counts = [_sum_bleu_counts(row, str(reference)) for row, reference in zip(rows, references, strict=True)]
        measures[BLEU] = np.stack(counts)
    general = np.array([_mean_general(row) for row in rows])  # [N, measures of GENERAL]
    for index, name in enumerate(GENERAL):
        measures[name] = general[:, index : index + 1]
    return measures


def _sample_values(row: Scores, name: str) -> list[float]:
    return [sample[name] for sample in row.scores]


def _pass_at_columns(passed: np.ndarray, ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Return pass@k of each prompt, [N, 1] for each k; passed [N, S] is 0 or 1 for each sample."""
    num_samples = passed.shape[1]
    num_passed = passed.sum(1).astype(int).tolist()
    columns: dict[str, np.ndarray] = {}
    for k in ks:
        estimates = [pass_at(k, num_samples, num) for num in num_passed]
        columns[f"pass@{k}"] = np.array(estimates)[:, None]
    return columns


def _sum_bleu_counts(row: Answers, reference: str) -> np.ndarray:
    return sum(bleu_counts(response.text, reference) for response in row.responses)


def _mean_general(row: Answers) -> list[float]:
    """Return the means over samples of the measures GENERAL, in that order."""
    samples = [list(general_measures(response).values()) for response in row.responses]
    return np.mean(samples, axis=0).tolist()


def add_feedback(measures: Columns, scores: Sequence[Sequence[float | None]]) -> dict[str, np.ndarray]:
    """Return the measures of one policy with those of a feedback source, after the task's own.

    A prompt has the mean over its judged responses, and 0 without any.

    Args:
        scores: By prompt, of each response; None for a response without usable feedback.
    """
    means: list[float] = []
    unjudged: list[float] = []
    for row in scores:
        judged = [score for score in row if score is not None]
        means.append(float(np.mean(judged)) if judged else 0.0)
        unjudged.append(1 - len(judged) / len(row))

    with_feedback = {name: values for name, values in measures.items() if name not in GENERAL}
    with_feedback[FEEDBACK] = np.array(means)[:, None]
    for name in GENERAL:
        with_feedback[name] = measures[name]
    with_feedback[UNJUDGED] = np.array(unjudged)[:, None]
    return with_feedback


def summarize(policies: Mapping[str, Columns], *, seed: int) -> dict[str, Any]:
    """Return each policy's figures with intervals, and the differences of every pair of policies; JSON values.

    A pair is (later, earlier) in the order of `policies`. p_holm is p adjusted over all pairs and tested measures. Both
    are None for the measures UNTESTED.
    """
    first_policy = next(iter(policies.values()))
    num_prompts = len(next(iter(first_policy.values())))
    draws = Draws(num_prompts, seed=seed)
    figures = {policy: _estimate_all(measures, draws) for policy, measures in policies.items()}
    pairs: list[dict[str, Any]] = []
    for against, policy in combinations(policies, 2):
        for name, values in policies[policy].items():
            difference = compare(values, policies[against][name], make_statistic(name, num_prompts), draws)
            pairs.append({"policy": policy, "against": against, "measure": name} | difference)
    _adjust_p(pairs)
    return {"policies": figures, "pairs": pairs}


def _estimate_all(measures: Columns, draws: Draws) -> dict[str, dict[str, float]]:
    """Return the statistic of each measure `with_interval`."""
    figures: dict[str, dict[str, float]] = {}
    for name, values in measures.items():
        statistic = make_statistic(name, draws.num_prompts)
        drawn = statistic(draws.sum_resamples(values))
        figures[name] = with_interval(drawn, statistic(values.sum(0)), draws.num_prompts)
    return figures


def _adjust_p(pairs: Sequence[dict[str, Any]]) -> None:
    """Set p_holm of each pair; both p are None for the measures UNTESTED."""
    tested = [pair for pair in pairs if pair["measure"] not in UNTESTED]
    adjusted = holm([pair["p"] for pair in tested])
    for pair in pairs:
        pair["p_holm"] = None
        if pair["measure"] in UNTESTED:
            pair["p"] = None
    for pair, p_holm in zip(tested, adjusted, strict=True):
        pair["p_holm"] = p_holm


def has_only_ties(summary: Mapping[str, Any], judged: Mapping[str, Any]) -> bool:
    """Return whether no tested measure and no judge distinguishes two policies on any prompt.

    Args:
        summary: Result of `summarize`.
        judged: Result of `pairwise.win_rates`.
    """
    tested = [pair for pair in summary["pairs"] if pair["p_holm"] is not None]
    rates = [pair["win_rate"] for pair in judged["pairs"] if pair["win_rate"]]
    ties = [pair["value"] == pair["resolvable"] == 0 for pair in tested]
    ties += [rate["low"] == rate["high"] == 0.5 for rate in rates]
    return bool(ties) and all(ties)
