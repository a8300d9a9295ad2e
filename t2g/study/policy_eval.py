"""What is measured of a policy's responses, and how policies differ on the same prompts.

A measure is a row of numbers for each prompt, [N, K], which its samples share, and a figure of the sums of all rows: a
mean (K 1), or corpus BLEU (K 10). What needs neither a model nor a program is counted here; ROUGE, facts and tests come
from `Task.measure`.
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

from t2g.study.paired import Draws, Figure, compare, holm, mean_of, told

BLEU, PASSED = "bleu", "passed"
REFERENCED = "rougeL"  # a task that is measured so is measured by BLEU as well
NGRAM = 4  # words whose second use counts as repetition (Welleck et al., arXiv 1908.04319)
GENERAL = ("words", "cut", "empty", "repetition")  # described, not tested: neither side of them is better

Columns = Mapping[str, np.ndarray]  # measure -> [N, K]


class Response(BaseModel):
    text: str
    cut: bool  # by the limit of tokens


class Answers(BaseModel):
    """A policy's responses to one prompt, by sample_index."""

    prompt_id: str
    key: str  # `content_key` of weights and prompt
    responses: tuple[Response, ...]


class Scores(BaseModel):
    """What the task measures of them, in the same order."""

    prompt_id: str
    key: str  # `content_key` of measure, prompt with references and tests, and responses
    scores: tuple[dict[str, float], ...]


def content_key(*content: Any) -> str:
    """Return a hash of plain values, models and dataclasses: equal content has the same key in every run."""
    return xxhash.xxh3_128_hexdigest(to_json(content, inf_nan_mode="constants", serialize_unknown=True))


def general(response: Response) -> dict[str, float]:
    """
    >>> general(Response(text="no no no no no", cut=False))
    {'words': 5.0, 'cut': 0.0, 'empty': 0.0, 'repetition': 0.5}
    """
    words = response.text.split()
    pieces = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    values = {
        "words": len(words),
        "cut": response.cut,
        "empty": not words,
        "repetition": 1 - len(set(pieces)) / len(pieces) if pieces else 0,
    }
    return {name: float(value) for name, value in values.items()}


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """The chance that one of k samples passes, without bias from the num_samples >= k that were drawn.

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
    """Of one response: matched and all n-grams of 1 to 4 words, its words, the reference's words. -> [10]"""
    score = _bleu().corpus_score([text], [[reference]])
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], float)


def bleu(sums: np.ndarray) -> np.ndarray:
    """Corpus BLEU of summed counts, [..., 10] -> [...], 0 to 100; the same as sacrebleu's of the texts."""
    rows = np.rint(sums.reshape(-1, 10)).astype(int).tolist()
    scores = [_bleu().compute_bleu(row[:4], row[4:8], *row[8:], smooth_method="exp").score for row in rows]
    return np.array(scores).reshape(sums.shape[:-1])


def bleu_signature() -> str:
    """What sacrebleu asks to be told with every number."""
    _bleu().corpus_score([""], [[""]])
    return str(_bleu().get_signature())


@cache
def _bert_scorer(folder: str, layer: int) -> Any:
    from bert_score import BERTScorer

    return BERTScorer(model_type=folder, num_layers=layer)


def bert_score(text: str, reference: str, folder: str, layer: int) -> float:
    """F1 of Zhang et al., arXiv 1904.09675; 0 for a blank text, which the package cannot take."""
    if not (text.strip() and reference.strip()):
        return 0.0
    return float(_bert_scorer(folder, layer).score([text], [reference])[2][0])


def figure_of(measure: str, num_prompts: int) -> Figure:
    return bleu if measure == BLEU else mean_of(num_prompts)


def columns(
    rows: Sequence[Answers], scores: Sequence[Scores], references: Sequence[str | None], ks: Sequence[int]
) -> dict[str, np.ndarray]:
    """Every measure of one policy, the task's own first. rows, scores, references: by prompt; ks: of pass@k."""
    found: dict[str, np.ndarray] = {}
    for name in scores[0].scores[0]:
        values = np.array([[sample[name] for sample in of.scores] for of in scores])  # [N, S]
        if name == PASSED:
            passed = [(values.shape[1], int(num)) for num in values.sum(1)]
            found |= {f"pass@{k}": np.array([[pass_at(k, *counts)] for counts in passed]) for k in ks}
        else:
            found[name] = values.mean(1, keepdims=True)
    if REFERENCED in found:
        pairs = zip(rows, references, strict=True)
        found[BLEU] = np.stack([sum(bleu_counts(r.text, str(wanted)) for r in row.responses) for row, wanted in pairs])
    told = [[general(response) for response in row.responses] for row in rows]
    return found | {name: np.array([[np.mean([one[name] for one in row])] for row in told]) for name in GENERAL}


def summarise(policies: Mapping[str, Columns], *, seed: int) -> dict[str, Any]:
    """Each policy's figures with intervals, and every pair's differences; JSON values.

    A pair is (later, earlier) in the order of `policies`; p_holm: of `p` among all pairs and tested measures, both None
    for the general ones.
    """
    num_prompts = len(next(iter(next(iter(policies.values())).values())))
    draws = Draws(num_prompts, seed=seed)

    def estimate(measure: str, values: np.ndarray) -> dict[str, float]:
        figure = figure_of(measure, num_prompts)
        return told(figure(draws.resampled(values)), figure(values.sum(0)), num_prompts)

    figures = {policy: {name: estimate(name, of[name]) for name in of} for policy, of in policies.items()}
    pairs = [
        {"policy": other, "against": one, "measure": name}
        | compare(values, policies[one][name], figure_of(name, num_prompts), draws)
        for one, other in combinations(policies, 2)
        for name, values in policies[other].items()
    ]
    tested = [pair for pair in pairs if pair["measure"] not in GENERAL]
    adjusted = iter(holm([pair["p"] for pair in tested]))
    for pair in pairs:
        pair |= {"p_holm": next(adjusted)} if pair in tested else {"p": None, "p_holm": None}
    return {"policies": figures, "pairs": pairs}


def has_only_ties(summary: Mapping[str, Any], judged: Mapping[str, Any]) -> bool:
    """Return whether no tested measure and no judge tells two policies apart on any prompt.

    Args:
        summary: Of `summarise`.
        judged: Of `pairwise.win_rates`.
    """
    ties = [pair["value"] == pair["resolvable"] == 0 for pair in summary["pairs"] if pair["p_holm"] is not None]
    ties += [rate["low"] == rate["high"] == 0.5 for pair in judged["pairs"] if (rate := pair["win_rate"])]
    return bool(ties) and all(ties)
