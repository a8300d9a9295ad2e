"""A judge in both orders: position bias recovered and kept out of the win rate, rubbish counted, judges compared."""

import numpy as np
import pytest

from t2g.config import LLMConfig
from t2g.study.pairwise import PairwiseJudgement, Verdict, make_judge_request, read_verdict, win_rates
from t2g.study.policy_eval import Answers, Response
from t2g.tasks.base import get_task

POLICIES = ("base", "new")


def judgement(prompt_id: int, first: str, verdict: str, judge: str = "j") -> PairwiseJudgement:
    second = next(name for name in POLICIES if name != first)
    return PairwiseJudgement(
        key="k", judge=judge, prompt_id=str(prompt_id), first=first, second=second, verdict=verdict, reason=""
    )


def judged(*verdicts: tuple[str, str], judge: str = "j") -> list[PairwiseJudgement]:
    """Of each prompt the verdict when `new` comes first, then when `base` does."""
    return [
        judgement(i, first, verdict, judge)
        for i, both in enumerate(verdicts)
        for first, verdict in zip(("new", "base"), both, strict=True)
    ]


def rates(judgements: list[PairwiseJudgement], new_words: int = 10) -> dict:
    ids = list(dict.fromkeys(one.prompt_id for one in judgements))

    def rows(num_words: int) -> list[Answers]:
        response = Response(text="word " * num_words, truncated=False)
        return [Answers(prompt_id=prompt_id, key="k", responses=(response,)) for prompt_id in ids]

    return win_rates(judgements, {"base": rows(10), "new": rows(new_words)}, seed=1)


@pytest.mark.parametrize(("quality", "win_rate"), [(0.5, 0.5), (0.8, 0.5 + 0.7 * 0.3)])
def test_position_bias_is_recovered_and_stays_out_of_the_win_rate(quality: float, win_rate: float) -> None:
    """A judge that says "the first" in 3 of 10 answers, whatever is there; else what is true of the prompt."""
    rng = np.random.default_rng(2)

    def verdict(new_is_first: bool, new_is_better: bool) -> str:
        return "A" if rng.random() < 0.3 or new_is_first == new_is_better else "B"

    better = rng.random(400) < quality
    (pair,) = rates(judged(*((verdict(True, b), verdict(False, b)) for b in better)))["pairs"]
    assert pair["policy"] == "new"
    assert pair["first_bias"]["low"] < 0.3 < pair["first_bias"]["high"]
    assert pair["first_bias"]["high"] - pair["first_bias"]["low"] < 0.15
    assert pair["win_rate"]["low"] < win_rate < pair["win_rate"]["high"]
    assert pair["consistency"] == pytest.approx(0.7, abs=0.05)


def test_by_hand() -> None:
    verdicts = [("A", "B"), ("A", "A"), ("tie", "tie"), ("B", "A"), ("A", "tie"), ("unparsable", "B")]
    (pair,) = rates(judged(*verdicts))["pairs"]
    assert pair["prompts"] == 5
    assert pair["win_rate"]["value"] == pytest.approx((1 + 0.5 + 0.5 + 0 + 0.5) / 5)
    assert pair["first_bias"]["value"] == pytest.approx((0 + 1 + 0 + 0 + 0.5) / 5)
    assert (pair["consistency"], pair["tie_share"], pair["unparsable_share"]) == (3 / 5, 3 / 12, 1 / 12)


def test_rubbish_is_counted_and_scores_nothing() -> None:
    (pair,) = rates(judged(*[("unparsable", "A")] * 9))["pairs"]
    assert pair["win_rate"] is None
    assert pair["unparsable_share"] == 0.5
    assert pair["prompts"] == 0


def test_win_rate_by_difference_of_length() -> None:
    wins = judged(("A", "B"), ("A", "B"), ("B", "A"))
    for new_words, name in ((11, "as long"), (12, "longer"), (5, "shorter")):
        (pair,) = rates(wins, new_words)["pairs"]
        assert pair["by_length"][name] == {"win_rate": pytest.approx(2 / 3), "prompts": 3}


def test_two_judges_agree_on_outcomes() -> None:
    both = judged(("A", "B"), ("A", "B"), ("A", "A")) + judged(("A", "B"), ("B", "A"), ("tie", "tie"), judge="k")
    (agreement,) = rates(both)["agreements"]
    assert agreement == {"judges": ["j", "k"], "share": pytest.approx(2 / 3), "of": 3}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"reason": "r", "verdict": "tie"}', "tie"),
        ('```json\n{"reason": "r", "verdict": "A"}\n```', "A"),
        ('<think>f() { return 1; }</think>\n{"reason": "r", "verdict": "A"}', "A"),
        ('{"reason": "r\nr", "verdict": "B",}', "B"),
        ('{"reason": "r", "verdict": "Tie"} as {this} shows', "tie"),
        ('{"verdict": "A"}', "unparsable"),
        ('{"reason": "r", "verdict": "C"}', "unparsable"),
        ('{"reason": "r", "verdict": "Answer A"}', "A"),
        ('{"reason": "r", "verdict": "**B**."}', "B"),
        ('{"reason": "r", "verdict": "**Answer:** _B_"}', "B"),
        ('{"reason": "r", "verdict": "T\u0130E"}', "unparsable"),
        ('{"reason": "r", "verdict": "t\u0131e"}', "unparsable"),
        ('{"reason": "r", "verdict": "Answer A or B"}', "unparsable"),
        ('{"reason": "r", "verdict": "A tie"}', "unparsable"),
        ('{"reason": "cut', "unparsable"),
        ("", "unparsable"),
        ("}{", "unparsable"),
        ('{"reason": "\\ud800", "verdict": "A"}', "A"),
    ],
)
def test_what_a_judge_answers(text: str, verdict: str) -> None:
    read = read_verdict(text)
    assert read["verdict"] == verdict
    assert read["reason"].encode() is not None, "no file can hold a surrogate"


def test_a_long_answer_is_bounded() -> None:
    assert len(read_verdict("x" * 9999)["reason"]) == 1000
    verdict = read_verdict('{"reason": "' + "x" * 9999 + '", "verdict": "A", "sure": true}')
    assert verdict == {"reason": "x" * 1000, "verdict": "A"}


def test_the_reason_is_requested_first() -> None:
    llm = LLMConfig(model="m")
    task = get_task("summarization")
    request = make_judge_request(task, "the post", "one", "two", llm)
    text = request.messages[0]["content"]
    assert text.index("the post") < text.index("Answer A:\none") < text.index("Answer B:\ntwo")
    schema = Verdict.model_json_schema()
    assert [*schema["properties"]] == schema["required"] == ["reason", "verdict"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["reason"]["maxLength"] == 1000
