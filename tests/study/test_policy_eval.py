"""Measures of responses against oracles: enumeration, sacrebleu on whole texts, and figures by hand."""

from itertools import combinations

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from t2g.study.policy_eval import (
    Answers,
    Response,
    Scores,
    bleu,
    bleu_counts,
    bleu_signature,
    columns,
    content_key,
    general_measures,
    has_only_ties,
    pass_at,
    summarize,
)

WORDS = ["the", "cat", "sat", "on", "a", "mat", ",", "and", "then", "it", "slept", "all", "day", "long", "."]


def answers(*texts: str, truncated: bool = False) -> Answers:
    return Answers(prompt_id="p", key="k", responses=tuple(Response(text=text, truncated=truncated) for text in texts))


def scores(**of_each: tuple[float, ...]) -> Scores:
    rows = (dict(zip(of_each, one, strict=True)) for one in zip(*of_each.values(), strict=True))
    return Scores(prompt_id="p", key="k", scores=tuple(rows))


def texts(num: int, seed: int) -> list[str]:
    """Sentences of 3 to 30 words, then an empty one and a huge one."""
    rng = np.random.default_rng(seed)
    some = [" ".join(rng.choice(WORDS, rng.integers(3, 30))) for _ in range(num - 2)]
    return [*some, "", " ".join(WORDS * 300)]


def test_pass_at_k_is_the_share_of_all_choices_with_a_pass() -> None:
    for num, k in ((1, 1), (5, 2), (6, 6), (8, 3)):
        for passed in range(num + 1):
            choices = [*combinations([i < passed for i in range(num)], k)]
            assert pass_at(k, num, passed) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_bleu_of_summed_counts_is_sacrebleus_of_all_texts() -> None:
    hypotheses = texts(50, 1)
    references = [f"{text} and a cat slept ." for text in texts(50, 1)]
    counts = np.stack([bleu_counts(h, r) for h, r in zip(hypotheses, references, strict=True)])
    corpus = BLEU().corpus_score(hypotheses, [references])
    assert bleu(counts.sum(0)) == pytest.approx(corpus.score, abs=1e-9)
    assert corpus.score > 5
    of_both = bleu(np.stack([counts.sum(0), counts[:9].sum(0)]))
    first_nine = BLEU().corpus_score(hypotheses[:9], [references[:9]])
    assert of_both[1] == pytest.approx(first_nine.score, abs=1e-9)
    assert {"tok:13a", "smooth:exp"} < set(bleu_signature().split("|"))


def test_responses_of_an_earlier_folder_are_read() -> None:
    assert Response.model_validate_json('{"text": "a", "cut": true}') == Response(text="a", truncated=True)


@pytest.mark.parametrize("text", ["", " \n", "one", "a a a a a a", "ü" * 9000])
def test_any_text_has_general_measures(text: str) -> None:
    measures = general_measures(Response(text=text, truncated=True))
    assert measures["truncated"] == 1
    assert measures["empty"] == float(not text.strip())
    assert 0 <= measures["repetition"] < 1
    assert measures["repetition"] == pytest.approx(2 / 3 if text == "a a a a a a" else 0)


def test_columns_have_a_row_for_each_prompt() -> None:
    rows = [answers("a b c d e", "x"), answers("", "a", truncated=True)]
    table = columns(rows, [scores(passed=(1, 0)), scores(passed=(0, 1))], [None, None], [1, 2])
    assert list(table) == ["pass@1", "pass@2", "words", "truncated", "empty", "repetition"]
    assert table["pass@1"].tolist() == [[0.5]] * 2
    assert table["pass@2"].tolist() == [[1.0]] * 2
    assert table["words"].tolist() == [[3], [0.5]]
    assert table["truncated"].tolist() == [[0], [1]]
    table = columns(rows, [scores(rougeL=(1, 0.5))] * 2, ["a b c d e", "z"], [1])
    assert table["rougeL"].tolist() == [[0.75]] * 2
    assert table["bleu"][0].tolist() == [5, 4, 3, 2, 6, 4, 3, 2, 6, 10]  # x, too; its reference counts again


def test_a_key_is_of_the_content_alone() -> None:
    response = Response(text="a", truncated=False)
    assert content_key({"a": 1}, response) == content_key({"a": 1}, Response(text="a", truncated=False))
    keys = {
        content_key(*of) for of in (["ab", "c"], ["a", "bc"], [["ab"], "c"], [float("nan")], [float("inf")], [None])
    }
    assert len(keys) == 6
    assert content_key("é") == "1c5bd77c00e44ee740772d86a8e53bce", "of another process as well"


def policy(texts: list[str], references: list[str]) -> dict[str, np.ndarray]:
    of_each = [scores(rougeL=(float(len(text) > 9),)) for text in texts]
    return columns([answers(text) for text in texts], of_each, references, [1])


def test_every_pair_is_compared_on_the_same_draws() -> None:
    references = [f"{text} ." for text in texts(40, 3)]
    whole = texts(40, 3)
    cut = [" ".join(text.split()[:8]) for text in texts(40, 3)]
    measured = {name: policy(texts, references) for name, texts in (("a", whole), ("b", cut), ("same", whole))}
    summary = summarize(measured, seed=1)
    assert {name: round(of["bleu"]["value"]) > 50 for name, of in summary["policies"].items()} == {
        "a": True, "b": False, "same": True,
    }  # fmt: skip
    pairs = {(pair["policy"], pair["against"], pair["measure"]): pair for pair in summary["pairs"]}
    assert len(pairs) == 3 * len(measured["a"])
    worse = pairs["b", "a", "bleu"]
    same = pairs["same", "a", "bleu"]
    assert worse["high"] < 0
    assert worse["p_holm"] >= worse["p"]
    assert worse["p"] < 0.01
    assert worse["wins"] is None
    assert worse["value"] == pytest.approx(
        summary["policies"]["b"]["bleu"]["value"] - summary["policies"]["a"]["bleu"]["value"]
    )
    assert (same["value"], same["low"], same["high"], same["p"], same["resolvable"]) == (0, 0, 0, 1, 0)
    assert pairs["b", "a", "words"]["high"] < 0
    assert pairs["b", "a", "words"]["p_holm"] is None
    assert pairs["b", "a", "rougeL"]["exact"]


def test_only_ties() -> None:
    same = {"value": 0.0, "resolvable": 0.0, "p_holm": 1.0}
    tie, win = ({"win_rate": {"value": v, "low": v, "high": v}} for v in (0.5, 1.0))
    unknown = {"win_rate": None}  # of a judge whose answers do not parse
    for pairs, judged, only_ties in (
        ([same, same], [], True),
        ([same, same | {"value": 0.1}], [], False),
        ([same, same | {"resolvable": 0.1}], [], False),  # wins and losses of equal number
        ([same, {"value": 3.0, "resolvable": 1.0, "p_holm": None}], [], True),  # words: described, not tested
        ([same], [tie], True),
        ([same], [tie, win], False),
        ([], [tie], True),
        ([], [unknown], False),
        ([], [], False),
    ):
        assert has_only_ties({"pairs": pairs}, {"pairs": judged}) is only_ties
