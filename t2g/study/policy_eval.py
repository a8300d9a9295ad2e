"""Measure the responses of policies, and compare policies on the same prompts.

A measure has K numbers for each prompt, [N, K], summed or averaged over the prompt's samples. Its figure is a function
of their sums over prompts: a mean (K = 1), or corpus BLEU (K = 10). Text statistics and BLEU are computed here. ROUGE,
facts and tests come from `Task.measure`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import xxhash
from pydantic import BaseModel
from pydantic_core import to_json

from t2g.study.paired import Draws, Figure, compare, holm, mean_of, with_interval

BLEU, PASSED = "bleu", "passed"
REFERENCED = "rougeL"  # a task with this measure has references, so BLEU is computed as well
NGRAM = 4  # length of a repeated n-gram (Welleck et al., arXiv 1908.04319)
GENERAL = ("words", "cut", "empty", "repetition")  # reported without a test: neither direction is better

Columns = Mapping[str, np.ndarray]  # measure -> [N, K]


class Response(BaseModel):
    text: str
    cut: bool  # truncated by the token limit


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

    >>> general_measures(Response(text="no no no no no", cut=False))
    {'words': 5.0, 'cut': 0.0, 'empty': 0.0, 'repetition': 0.5}
    """
    words = response.text.split()
    ngrams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return {
        "words": float(len(words)),
        "cut": float(response.cut),
        "empty": float(not words),
        "repetition": 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0,
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
    rows = np.rint(sums.reshape(-1, 10)).astype(int).tolist()
    scores = [_bleu().compute_bleu(row[:4], row[4:8], *row[8:], smooth_method="exp").score for row in rows]
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
    return float(_bert_scorer(folder, layer).score([text], [reference])[2][0])


def figure_of(measure: str, num_prompts: int) -> Figure:
    return bleu if measure == BLEU else mean_of(num_prompts)


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
        values = np.array([[sample[name] for sample in row.scores] for row in scores])  # [N, S]
        if name == PASSED:
            passed = [(values.shape[1], int(num)) for num in values.sum(1)]
            measures |= {f"pass@{k}": np.array([[pass_at(k, *counts)] for counts in passed]) for k in ks}
        else:
            measures[name] = values.mean(1, keepdims=True)
    if REFERENCED in measures:
        pairs = zip(rows, references, strict=True)
        measures[BLEU] = np.stack([sum(bleu_counts(r.text, str(ref)) for r in row.responses) for row, ref in pairs])
    general = [[general_measures(response) for response in row.responses] for row in rows]
    return measures | {name: np.array([[np.mean([r[name] for r in row])] for row in general]) for name in GENERAL}


def summarise(policies: Mapping[str, Columns], *, seed: int) -> dict[str, Any]:
    """Return each policy's figures with intervals, and the differences of every pair of policies; JSON values.

    A pair is (later, earlier) in the order of `policies`. p_holm is p adjusted over all pairs and tested measures. Both
    are None for the measures GENERAL.
    """
    num_prompts = len(next(iter(next(iter(policies.values())).values())))
    draws = Draws(num_prompts, seed=seed)

    def estimate(measure: str, values: np.ndarray) -> dict[str, float]:
        figure = figure_of(measure, num_prompts)
        return with_interval(figure(draws.resampled(values)), figure(values.sum(0)), num_prompts)

    figures = {policy: {name: estimate(name, values) for name, values in c.items()} for policy, c in policies.items()}
    pairs = [
        {"policy": policy, "against": against, "measure": name}
        | compare(values, policies[against][name], figure_of(name, num_prompts), draws)
        for against, policy in combinations(policies, 2)
        for name, values in policies[policy].items()
    ]
    tested = [pair for pair in pairs if pair["measure"] not in GENERAL]
    adjusted = iter(holm([pair["p"] for pair in tested]))
    for pair in pairs:
        pair |= {"p_holm": next(adjusted)} if pair in tested else {"p": None, "p_holm": None}
    return {"policies": figures, "pairs": pairs}


def has_only_ties(summary: Mapping[str, Any], judged: Mapping[str, Any]) -> bool:
    """Return whether no tested measure and no judge distinguishes two policies on any prompt.

    Args:
        summary: Result of `summarise`.
        judged: Result of `pairwise.win_rates`.
    """
    ties = [pair["value"] == pair["resolvable"] == 0 for pair in summary["pairs"] if pair["p_holm"] is not None]
    ties += [rate["low"] == rate["high"] == 0.5 for pair in judged["pairs"] if (rate := pair["win_rate"])]
    return bool(ties) and all(ties)
