"""The tiny world: posts, planted faults, the feedback, the measure, prompts, tokenizers and initial models."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2g.config import StyleConfig, WorldConfig
from t2g.feedback.fixes import apply_fixes
from t2g.feedback.parse import format_answer, make_feedback, make_quote
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import SPARSE
from t2g.tasks.tiny import assets, world
from t2g.tasks.tiny.task import TinyTask
from t2g.tasks.tiny.world import Clause
from t2g.types import Prompt, Span

FACTS = {"name": "José", "thing": "phone", "fault": "hums", "day": "Monday", "place": "東京"}
POST = Prompt(prompt_id="1", prompt_ids=np.zeros(0, np.int32), prompt_text="A post.", task="tiny")
TASK = TinyTask()
NO_FAULTS = WorldConfig(wrong=0.0, missing=0.0, invented=0.0, repeated=0.0)


def quotes(response: str, spans: list[Span]) -> list[tuple[str, int]]:
    quoted = [make_quote(response, span) for span in spans]
    return [(quote.quote, quote.occurrence) for quote in quoted]


def target_of(facts: world.Facts, response: str, *, style: StyleConfig = SPARSE) -> str:
    critique, good, poor = world.judge_summary(facts, response)
    good_quotes = [make_quote(response, span) for span in good]
    poor_quotes = [make_quote(response, span) for span in poor]
    return format_answer(critique, good_quotes, poor_quotes, style=style)


# ------------------------------------------------------------------------------------------------------------ generator
def test_ideal_summary_is_the_faultless_summary() -> None:
    ideal = "by José, about a phone, it hums, since Monday, in 東京."
    assert world.ideal_summary(FACTS) == ideal
    assert world.make_summary(FACTS, NO_FAULTS, np.random.default_rng(0)) == ideal


def test_post_states_every_fact_once() -> None:
    post = world.make_post(FACTS, np.random.default_rng(3))
    assert [post.count(value) for value in FACTS.values()] == [1] * 5
    assert post.count(".") == 5


def test_no_value_hides_in_another_text_of_the_world() -> None:
    values = [value for options in world.SLOTS.values() for value in options]
    others = [*values, *world.CLAUSE_LEADS.values(), *world.INVENTIONS]
    assert all(value not in other for value in values for other in others if value != other)


def test_planted_faults_come_at_their_rates() -> None:
    rates = WorldConfig(wrong=0.3, missing=0.2, invented=0.15, repeated=0.1)
    rows = list(world.make_records(count=2000, heldout=False, rates=rates, seed=5))
    totals = [world.measure(row["facts"], row["tldr_human_reference_summary"]) for row in rows]
    mean = {}
    for key in totals[0]:
        mean[key] = np.mean([total[key] for total in totals])
    # 5 facts x .8 stated = 4 clauses, + .15 invented + .1 repeated; 4 x .3 = 1.2 wrong, + .1 x .3 repeated
    assert mean["clauses"] == pytest.approx(4.25, abs=0.08)
    assert mean["wrong"] == pytest.approx(1.23, abs=0.08)
    assert mean["invented"] == pytest.approx(0.15, abs=0.025)
    assert mean["repeated"] == pytest.approx(0.1 * 0.7, abs=0.02)
    assert mean["fact_recall"] == pytest.approx(0.8 * 0.7, abs=0.02)


def test_a_summary_always_states_something() -> None:
    rates = WorldConfig(missing=0.95, wrong=0.0, invented=0.0, repeated=0.0)
    rng = np.random.default_rng(0)
    assert all(world.split_clauses(world.make_summary(FACTS, rates, rng)) for _ in range(50))


# -------------------------------------------------------------------------------------------------------------- records
def test_held_out_combinations_never_appear_in_training_of_any_seed(tmp_path: Path) -> None:
    held = world.write_world(tmp_path, WorldConfig(num_train=300, num_heldout=100, seed=0))["heldout"]
    combos = {tuple(json.loads(line)["facts"].values()) for line in held.read_text(encoding="utf-8").splitlines()}
    for seed in (0, 1):
        rows = world.make_records(count=300, heldout=False, rates=WorldConfig(), seed=seed)
        assert not combos & {tuple(row["facts"].values()) for row in rows}


def test_records_are_reproducible_and_carry_the_slf5k_fields(tmp_path: Path) -> None:
    first = world.write_world(tmp_path / "a", WorldConfig(num_train=3, num_heldout=2, seed=7))
    again = world.write_world(tmp_path / "b", WorldConfig(num_train=3, num_heldout=2, seed=7))
    assert [path.read_bytes() for path in first.values()] == [path.read_bytes() for path in again.values()]
    row = json.loads(first["train"].read_text(encoding="utf-8").splitlines()[0])
    assert set(row) == {
        "id",
        "subreddit",
        "title",
        "post",
        "tldr_human_reference_summary",
        "ideal_human_summary",
        "generated_summary_for_feedback",
        "feedback",
        "facts",
    }
    assert row["ideal_human_summary"] == world.ideal_summary(row["facts"])


# ------------------------------------------------------------------------------------------------------------- feedback
def test_clauses_and_their_values() -> None:
    assert world.split_clauses("by Zoë, la la.") == [Clause(0, 6, "name", 3), Clause(8, 13, None, 8)]
    assert world.split_clauses(" ,. ;\n") == []
    assert world.split_clauses("") == []
    # a lead without a value, and a lead inside a longer word, are no statements of a fact
    assert world.split_clauses("by") == [Clause(0, 2, None, 0)]
    assert world.split_clauses("byte 1") == [Clause(0, 6, None, 0)]


def test_feedback_gives_evidence_then_verdict_for_every_clause() -> None:
    response = "by José, about a laptop, plays chess, since Monday."
    judged = world.judge_summary(FACTS, response)
    assert judged.critique == (
        "The name is José, it says José: right. The thing is phone, it says laptop: wrong. "
        "It says plays chess: invented. The day is Monday, it says Monday: right. "
        "The fault is missing. The place is missing."
    )
    assert quotes(response, judged.good) == [("José", 1), ("Monday", 1)]
    assert quotes(response, judged.poor) == [("laptop", 1), ("plays chess", 1)]
    about = judged.poor[0].critique_range
    assert about and judged.critique[slice(*about)] == "The thing is phone, it says laptop: wrong."


def test_a_right_fact_pays_once() -> None:
    response = "it hums, it hums, it leaks, it hums."
    judged = world.judge_summary(FACTS, response)
    assert quotes(response, judged.good) == [("hums", 1)]
    assert quotes(response, judged.poor) == [("hums", 2), ("leaks", 1), ("hums", 3)]
    assert judged.critique.startswith(
        "The fault is hums, it says hums: right. The fault is hums, it says hums: repeated. "
        "The fault is hums, it says leaks: wrong. The fault is hums, it says hums: repeated. The name is missing."
    )


def test_a_wrong_fact_may_be_put_right() -> None:
    response = "in Oslo, in 東京."
    judged = world.judge_summary(FACTS, response)
    assert quotes(response, judged.good) == [("東京", 1)]
    assert quotes(response, judged.poor) == [("Oslo", 1)]


@pytest.mark.parametrize("dense", [False, True])
def test_fixes_of_wrong_values_give_the_ideal_summary_and_change_no_target(dense: bool) -> None:
    rng = np.random.default_rng(0)
    rates = WorldConfig(wrong=0.5, missing=0.0, invented=0.0, repeated=0.0)
    for _ in range(50):
        facts = world.sample_facts(rng, heldout=False)
        response = world.make_summary(facts, rates, rng)
        judged = world.judge_summary(facts, response, dense=dense)
        assert apply_fixes(response, [*judged.good, *judged.poor]) == world.ideal_summary(facts)
        bare = [make_quote(response, replace(span, fix=None)) for span in judged.poor]
        quotes = [make_quote(response, span) for span in judged.poor]
        assert format_answer("", [], quotes) == format_answer("", [], bare)


def test_a_fix_states_no_fact_twice() -> None:
    response = "in Oslo, in Lima, by Zoë, by José, it hums, it hums, plays chess."
    poor = world.judge_summary(FACTS, response).poor
    assert [span.fix for span in poor] == ["東京", None, None, None, None]
    assert apply_fixes(response, poor) == response.replace("Oslo", "東京")


def test_a_value_in_the_wrong_clause_and_an_unknown_value_are_wrong() -> None:
    response = "since phone; about a zebra\nby José José"
    judged = world.judge_summary(FACTS, response)
    assert quotes(response, judged.good) == []
    assert quotes(response, judged.poor) == [("phone", 1), ("zebra", 1), ("José José", 1)]


def test_an_empty_response_is_all_omissions() -> None:
    response = ""
    judged = world.judge_summary(FACTS, response)
    assert (judged.good, judged.poor) == ([], [])
    assert judged.critique.count("is missing.") == 5


def test_dense_labels_are_whole_clauses_with_the_same_verdicts() -> None:
    summary = "by José, about a laptop, plays chess, it hums, it hums."
    sparse = world.judge_summary(FACTS, summary)
    dense = world.judge_summary(FACTS, summary, dense=True)
    assert dense.critique == sparse.critique
    assert quotes(summary, dense.good) == [("by José", 1), ("it hums", 1)]
    assert quotes(summary, dense.poor) == [("about a laptop", 1), ("plays chess", 1), ("it hums", 2)]
    assert [q.critique_range for q in dense.poor] == [q.critique_range for q in sparse.poor]
    covered = make_feedback(dense.critique, dense.good, dense.poor, summary, source="program", version="v").spans
    letters = list(summary)
    for s in covered:
        letters[s.start : s.end] = [""] * (s.end - s.start)
    assert "".join(letters) == ", , , , ."


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_garbage_gets_quotes_that_stand_in_it_and_never_overlap(seed: int, dense: bool) -> None:
    rng = np.random.default_rng(seed)
    pieces = [
        "by",
        "in",
        "about a",
        "José",
        "東京",
        "it",
        "hums",
        "🎧",
        ",",
        ", ",
        ".",
        '"',
        "\\",
        "\n",
        "�",
        " ",
        "\t",
    ]
    response = "".join(pieces[i] + " " * int(rng.integers(2)) for i in rng.integers(len(pieces), size=30))
    judged = world.judge_summary(FACTS, response, dense=dense)
    assert judged == world.judge_summary(FACTS, response, dense=dense)
    taken: list[tuple[int, int]] = []
    for span in [*judged.good, *judged.poor]:
        text = response[span.start : span.end]
        taken.append((span.start, span.end))
        assert text == text.strip() != ""
        assert span.critique_range
        assert dense or text in judged.critique[slice(*span.critique_range)]
    taken.sort()
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(taken))
    assert json.loads(target_of(FACTS, response))["critique"] == judged.critique


# -------------------------------------------------------------------------------------------------------------- measure
def test_measure_by_hand() -> None:
    # 4 clauses: 2 facts right, 1 wrong, 1 invented: precision 2/4, recall 2/5, F1 = 2 x 2 / (4 + 5)
    measures = world.measure(FACTS, "by José, about a laptop, plays chess, since Monday.")
    assert measures == {
        "fact_precision": 0.5,
        "fact_recall": 2 / 5,
        "fact_f1": 4 / 9,
        "repeated": 0,
        "wrong": 1,
        "invented": 1,
        "clauses": 4,
        "length": 51,
    }


def test_repeating_a_right_fact_lowers_f1() -> None:
    once = world.measure(FACTS, "it hums.")
    twice = world.measure(FACTS, "it hums, it hums.")
    assert (once["fact_f1"], once["repeated"]) == (2 / 6, 0)
    assert (twice["fact_f1"], twice["repeated"]) == (2 / 7, 1)


def test_measure_of_the_ideal_and_of_nothing() -> None:
    assert world.measure(FACTS, world.ideal_summary(FACTS))["fact_f1"] == 1.0
    assert world.measure(FACTS, "")["fact_f1"] == 0.0
    assert world.measure(FACTS, "")["fact_precision"] == 0.0


# --------------------------------------------------------------------------------------------------- prompts and target
def test_prompts() -> None:
    assert TinyTask().policy_messages({"post": "A post."}) == [{"role": "user", "content": "Summarise: A post."}]
    assert TinyTask().feedback_messages(POST, "it hums.") == [
        {"role": "user", "content": "Judge the summary. Post: A post.\nSummary: it hums."}
    ]


def test_every_style_has_instructions_of_its_own_and_the_default_those_of_the_demo() -> None:
    task = TinyTask()
    styles = [StyleConfig(critique=critique, labels=labels) for critique, labels in world.FEEDBACK_INSTRUCTIONS]
    assert styles[0] == StyleConfig()
    contents = {task.feedback_messages(POST, "it hums.", style=style)[0]["content"] for style in styles}
    assert len(contents) == 4
    assert all(text.endswith(" Post: A post.\nSummary: it hums.") for text in contents)


def test_the_task_knows_its_feedback_function_and_its_response() -> None:
    (record,) = world.make_records(count=1, heldout=False, rates=WorldConfig(), seed=3)
    task = TinyTask()
    response = task.response(record)
    assert response == record["generated_summary_for_feedback"]
    assert task.response({"post": "p"}) is None
    for labels in ("sparse", "dense"):
        judge = task.make_feedback_function(style=StyleConfig(labels=labels), sandbox=SandboxConfig())
        judged = judge(record["post"], response, payload=task.payload(record))
        assert judged == world.judge_summary(record["facts"], response, dense=labels == "dense")


def test_target_is_plain_json_with_occurrences_only_where_needed() -> None:
    target = target_of(FACTS, "it hums, it hums.")
    assert target.endswith('missing.", "good": ["hums"], "poor": [{"quote": "hums", "occurrence": 2}]}')
    assert target.startswith('{"critique": "The fault is hums, it says hums: right.')


# --------------------------------------------------------------------------------------------------------------- assets
@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return assets.build_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def test_tokenizers_differ_and_spell_every_text(tokenizers: Any) -> None:
    policy, reward = tokenizers
    assert len(policy) != len(reward)
    rows = world.make_records(count=20, heldout=False, rates=WorldConfig(), seed=1)
    texts = ['odd "\\\n 😀 ñ']
    for row in rows:
        answer = target_of(row["facts"], row["generated_summary_for_feedback"])
        texts += [row["post"], row["tldr_human_reference_summary"], answer]
    for tokenizer in tokenizers:
        for text in texts:
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_values_split_and_phrases_do_not(tokenizers: Any) -> None:
    policy, reward = tokenizers
    assert len(policy.tokenize(" phone")) == 1
    assert len(policy.tokenize(" 東京")) == 7  # a space and two characters of three bytes
    assert len(reward.tokenize(", it says")) == 1


def test_chat_template(tokenizers: Any) -> None:
    policy, _ = tokenizers
    messages = TinyTask().policy_messages({"post": "A."})
    text = policy.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>Summarise: A.<|end|><|assistant|>"
    ids = policy(text, add_special_tokens=False).input_ids
    assert (ids[0], ids[-1], ids[-2]) == (
        policy.convert_tokens_to_ids("<|user|>"),
        policy.convert_tokens_to_ids("<|assistant|>"),
        policy.eos_token_id,
    )


def test_model_folder_loads(tokenizers: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, _ = tokenizers
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    built = assets.build_model(tmp_path, policy, seed=3, **small)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.num_parameters() == built.num_parameters()
    assert loaded.config.eos_token_id == policy.eos_token_id
    assert float(loaded.lm_head.weight.detach().std()) == pytest.approx(0.08, rel=0.05)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == assets.CHAT_TEMPLATE


# ------------------------------------------------------------------------------------------------------ planted faults
def test_planted_responses_hold_faults_of_each_class_and_follow_from_the_seed() -> None:
    prompt = replace(POST, payload={"facts": FACTS})
    planted = [TASK.plant_faults(prompt, np.random.default_rng(seed)) for seed in range(400)]
    assert planted == [TASK.plant_faults(prompt, np.random.default_rng(seed)) for seed in range(400)]
    responses = [response for response in planted if response]
    counts = Counter(kind for response in responses for kind, _, _ in TASK.faults(prompt, response))
    counts["missing"] = sum(
        world.judge_summary(FACTS, response).critique.count("is missing.") for response in responses
    )
    assert set(counts) == {"wrong", "repeated", "invented", "missing"}
    assert min(counts.values()) > 0.3 * len(planted), counts  # each class stands in every third response at least
    assert TASK.plant_faults(POST, np.random.default_rng(0)) is None  # its payload has no facts
