"""The annotation without files: samples, requests, keys of records, the held-out split and the summary."""

import asyncio
import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeFeedback, FakeRollouts, letter_prompts, letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from t2g.data.load import FileRecord
from t2g.errors import UserError
from t2g.feedback.parse import Quote, make_feedback
from t2g.feedback.records import AnnotatedRecord, make_annotated_record, read_record
from t2g.interfaces import Sampling
from t2g.loop.annotation import (
    Annotator,
    Sample,
    format_summary,
    make_refused_record,
    make_samples,
    make_turn_samples,
    plant_samples,
    record_keys,
    select_heldout_prompts,
    summarize,
)
from t2g.tasks.base import get_task
from t2g.tasks.prompts_only import PromptsTask
from t2g.tasks.tiny.task import TinyTask
from t2g.types import Prompt

NOTHING = make_feedback("c", [], [], "x", source="s", version="v")
SAMPLING = Sampling(num_samples=2, temperature=1.0, max_new_tokens=4, seed=3)
ROWS = [
    {"id": "a", "prompt": "Why?", "response": "a b"},
    {"id": "a", "prompt": "Why?", "response": "b"},
    {"prompt": "Who?", "response": "c"},
    {"id": "d", "prompt": "How?"},
    {"id": "e", "response": "d"},
    {"id": "f", "prompt": "Where?", "response": ["here"]},
]


def samples_of(*rows: dict[str, Any]) -> list[Sample]:
    return make_samples(rows, PromptsTask())


def judged(samples: list[Sample], **keywords: Any) -> dict[str, AnnotatedRecord]:
    """Records by key."""
    return asyncio.run(make_records(samples, FakeFeedback(), **keywords))


async def make_records(samples: list[Sample], source: FakeFeedback, **keywords: Any) -> dict[str, AnnotatedRecord]:
    """Records by key, in the order in which they are finished."""
    annotator = Annotator(source, **keywords)
    records: dict[str, AnnotatedRecord] = {}

    async def make_record(sample: Sample) -> None:
        records[sample.key] = await annotator.judge(sample.key, await annotator.respond(sample))

    await asyncio.gather(*map(make_record, samples))
    return records


def test_a_sample_for_each_record_and_a_problem_that_names_it() -> None:
    samples = samples_of(*ROWS)
    assert [(s.prompt.prompt_id, s.sample_index, s.response) for s in samples[:2]] == [("a", 0, "a b"), ("a", 1, "b")]
    assert samples[2].prompt.prompt_id == samples_of(ROWS[2])[0].prompt.prompt_id != ""
    assert [s.prompt.prompt_id for s in samples[3:]] == ["d", "e", "f"]
    assert [bool(s.problem) for s in samples] == [False, False, False, True, True, True]
    assert samples[3].problem == "data record 4 has no response; it has id, prompt"
    assert samples[4].problem.startswith("data record 5: has no field prompt or messages")
    assert samples[5].problem.startswith("data record 6: response[0] needs a role")
    failed = make_refused_record(samples[3], "llm")
    assert (failed.prompt_id, failed.response, failed.status, failed.source) == ("d", "", "failed", "llm")
    assert failed.reason == samples[3].problem


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("summarization", {"post": "It rains.", "response": "Rain.", "subreddit": "weather"}),
        ("code", {"question": "Add.", "response": "x = 1", "test": "def test(): pass"}),
    ],
)
def test_an_annotated_record_is_a_sample_again(task: str, row: dict[str, Any]) -> None:
    """`t2g mark` writes such records, and `annotate.source=human` reads them."""
    (first,) = make_samples([row], get_task(task))
    marked = make_annotated_record(first.prompt, str(first.response), NOTHING)
    (again,) = make_samples([marked.model_dump(mode="json")], get_task(task))
    assert not again.problem
    assert (again.prompt.prompt_id, again.prompt.prompt_text) == (first.prompt.prompt_id, first.prompt.prompt_text)
    assert (again.prompt.payload, again.response) == (first.prompt.payload, first.response)


def test_the_file_of_a_record_is_kept_beside_its_payload_and_identifies_nothing() -> None:
    (sample,) = samples_of(ROWS[0])
    moved = replace(sample, prompt=replace(sample.prompt, data_file="b.jsonl"))
    assert moved.key == sample.key
    record = judged([moved])[moved.key]
    assert (record.data_file, record.to_prompt().data_file, record.payload) == (
        "b.jsonl",
        "b.jsonl",
        {"response": "a b"},
    )
    assert record_keys(record) == record_keys(judged([sample])[sample.key])
    assert read_record(json.loads(record.model_dump_json())) == record


def test_given_responses_are_judged_as_they_are() -> None:
    samples = samples_of(*ROWS[:3])
    records = judged(samples)
    records_in_order = [records[sample.key] for sample in samples]
    first, second, _ = records_in_order
    assert (first.prompt_id, first.sample_index, first.response) == ("a", 0, "a b")
    assert (first.good, first.poor) == ((Quote(quote="a"),), (Quote(quote="b"),))
    assert (second.prompt_id, second.sample_index, second.response) == ("a", 1, "b")
    assert (second.good, second.poor) == ((), (Quote(quote="b"),))
    assert records_in_order[2].status == "empty"


@pytest.mark.parametrize(
    "payload", [{}, {"when": datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), "nan": float("nan"), "list": (1, 2.0)}]
)
def test_a_record_is_known_again_by_what_was_judged(payload: dict[str, Any]) -> None:
    (sample,) = samples_of(ROWS[0])
    sample = replace(sample, prompt=replace(sample.prompt, payload=payload))
    record = AnnotatedRecord.model_validate_json(judged([sample])[sample.key].model_dump_json())
    assert record_keys(record) == (sample.key, replace(sample, response=None).key)
    for change in ({"response": "b a"}, {"prompt": "What?"}, {"prompt_id": "b"}, {"payload": {"x": 1}}):
        assert sample.key not in record_keys(record.model_copy(update=change))
    by_response, by_number = record_keys(record.model_copy(update={"sample_index": 1}))
    assert by_response == sample.key
    assert by_number != replace(sample, response=None).key


def test_the_policy_samples_once_for_each_incomplete_prompt(tmp_path: Path) -> None:
    policy = FakeRollouts(letter_tokenizer(tmp_path))
    sampled_ids = []

    async def write(prompt: Prompt) -> list[str]:
        sampled_ids.append(prompt.prompt_id)
        await asyncio.sleep({"p0": 0.02, "p1": 0.01}.get(prompt.prompt_id, 0))  # the last overtakes the first
        return [rollout.response_text for rollout in await policy.sample(prompt, SAMPLING)]

    samples = [Sample(prompt, index) for prompt in letter_prompts(3) for index in range(2)]
    missing = [sample for sample in samples if (sample.prompt.prompt_id, sample.sample_index) != ("p1", 1)][2:]
    records = judged(missing, sample_responses=write)
    assert sampled_ids == ["p1", "p2"]
    assert [(r.prompt_id, r.sample_index) for r in records.values()] == [("p2", 0), ("p2", 1), ("p1", 0)]
    whole = judged(samples, sample_responses=write)
    assert {key: whole[key] for key in records} == records
    assert {record_keys(record)[1] for record in whole.values()} == {sample.key for sample in samples}


@pytest.mark.parametrize(("per_prompt", "counts"), [(0, [0, 0, 0, 0]), (0.5, [0, 1, 0, 1]), (1.5, [1, 2, 1, 2])])
def test_planted_samples_stand_beside_the_others_of_their_prompt(per_prompt: float, counts: list[int]) -> None:
    facts = {"name": "José", "thing": "phone", "fault": "hums", "day": "Monday", "place": "東京"}
    prompts = [replace(prompt, payload={"facts": facts}) for prompt in letter_prompts(4)]
    samples = [Sample(prompt, index) for prompt in prompts for index in range(2)]
    samples.append(Sample(replace(prompts[0], prompt_id="bad"), 0, None, problem="data record 9 has no response"))
    planted = plant_samples(samples, TinyTask(), per_prompt, seed=1)
    planted_prompts = [sample.prompt for sample in planted]
    assert [planted_prompts.count(prompt) for prompt in prompts] == counts
    assert {sample.sample_index for sample in planted} <= {2, 3}  # the prompt's own have 0 and 1
    assert len(planted) == sum(counts) == len({sample.response for sample in planted})
    without_response = Sample(prompts[1], 5, None, problem="data record 3 has no response")
    after_problem = plant_samples([*samples, without_response], TinyTask(), 1, seed=1)
    assert [sample.sample_index for sample in after_problem] == [2, 6, 2, 2]
    assert plant_samples(samples[2:], TinyTask(), 2, seed=1)[-1] == plant_samples(samples, TinyTask(), 2, seed=1)[-1]


def test_a_task_that_plants_no_faults_is_refused() -> None:
    with pytest.raises(UserError, match=r"^annotate.planted=0.5: task prompts plants no faults for prompt d; set it"):
        plant_samples(samples_of(ROWS[0], ROWS[2] | {"id": "d"}), PromptsTask(), 0.5, seed=1)


@given(st.sets(st.text(max_size=3), max_size=12), st.floats(0.01, 0.99))
def test_something_is_held_out_and_something_is_not(prompts: set[str], share: float) -> None:
    held = select_heldout_prompts(prompts, share)
    assert held <= prompts
    assert len(held) < max(len(prompts), 1)
    assert held or len(prompts) < 2


def test_the_held_out_share_and_its_members() -> None:
    prompts = [str(i) for i in range(4000)]
    held = select_heldout_prompts(prompts, 0.25)
    assert abs(len(held) / 4000 - 0.25) < 0.03  # four standard deviations
    assert select_heldout_prompts(prompts[:400], 0.25) == held & set(prompts[:400])  # whatever else there is
    assert select_heldout_prompts(["only", "only"], 0.5) == set()


def record(status: str, **fields: Any) -> AnnotatedRecord:
    return AnnotatedRecord(prompt_id="p", prompt="p", response="abcd", critique="c", status=status, **fields)


CHAT = [
    {"role": role, "content": content}
    for role, content in (
        ("user", "Write f."), ("assistant", "f = 1"), ("user", "No."), ("assistant", None), ("tool", "7"),
        ("assistant", "f = 2"),
    )
]  # fmt: skip


def test_each_turn_with_a_reply_is_a_sample_and_the_others_are_left_out() -> None:
    rows = [FileRecord({"id": 7, "messages": CHAT, "team": "x"}, "log.jsonl:3", "log.jsonl")]
    first, blank, last = make_turn_samples(rows, PromptsTask())
    assert (first.prompt.prompt_id, first.prompt.prompt_text, first.response) == ("7/1", "Write f.", "f = 1")
    assert first.prompt.payload == {"team": "x", "next_message": "No."}
    assert first.prompt.data_file == "log.jsonl"
    assert [first.problem, blank.problem, last.problem] == [
        "",
        "data record 1 (log.jsonl:3): the assistant's turn 2 has no text",
        "data record 1 (log.jsonl:3): the assistant's turn 3 has no reply",
    ]
    assert [sample.is_left_out for sample in (first, blank, last)] == [False, True, True]
    greeting = [{"role": "assistant", "content": "Hello!"}, *CHAT]
    hello, again = make_turn_samples([{"messages": greeting}], PromptsTask())[:2]
    assert hello.problem == "data record 1: the assistant's turn 1 has no message by a user before it"
    assert again.prompt.prompt_text == "assistant: Hello!\n\nuser: Write f."
    assert again.prompt.messages == tuple(greeting[:2])


def test_a_picture_leaves_out_its_turn_and_not_the_conversation() -> None:
    picture = {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image_url"}]}
    more = [{"role": "user", "content": "No."}, {"role": "assistant", "content": "f = 3"}]
    chat = [picture, *CHAT[1:2], *more, {"role": "user", "content": "Yes."}]
    picture_turn, last = make_turn_samples([{"id": 7, "messages": chat}], PromptsTask())
    assert (
        picture_turn.is_left_out
        and "the assistant's turn 1 is not understood: messages[0] has the content" in picture_turn.problem
    )
    assert (last.problem, last.response) == ("", "f = 3")
    assert last.prompt.prompt_text.startswith("user: Look.\n\nassistant: f = 1")


def test_a_log_without_an_answer_is_counted_and_makes_no_record() -> None:
    (sample,) = make_turn_samples([{"id": 3, "messages": CHAT[:1]}], PromptsTask())
    assert (sample.problem, sample.is_left_out) == ("data record 1 has no message by the assistant", True)


def test_the_keys_of_turns_stay_where_a_conversation_grows() -> None:
    longer = [*CHAT, {"role": "user", "content": "Good."}]
    for fields in ({}, {"id": "7"}):
        before = make_turn_samples([{"messages": CHAT} | fields], PromptsTask())
        after = make_turn_samples([{"messages": longer} | fields], PromptsTask())
        assert before[0].key == after[0].key
        assert [not sample.problem for sample in after] == [True, False, True]
    same = make_turn_samples([{"messages": longer}, {"messages": longer}], PromptsTask())
    assert [sample.sample_index for sample in same] == [0, 0, 0, 1, 0, 1]
    assert same[0].key == same[3].key
    assert len({sample.prompt.prompt_id for sample in same}) == 3


def test_turns_of_conversations_with_one_opening_are_one_group() -> None:
    others = [{"role": "user", "content": "Write f."}, {"role": "assistant", "content": "f = 9"}, *CHAT[2:]]
    new = [{"role": "system", "content": "Be short."}, *CHAT]
    samples = make_turn_samples([{"messages": chat} for chat in (CHAT, others, new)], PromptsTask())
    assert [sample.group for sample in samples] == 6 * ["Write f."] + 3 * ["system: Be short.\n\nuser: Write f."]


def test_a_malformed_conversation_is_one_failed_record_that_names_its_line() -> None:
    broken = [CHAT[0], {"role": "bot", "content": "f"}]
    rows = [FileRecord({"messages": broken}, "log.jsonl:9", "log.jsonl"), {"messages": CHAT}]
    sample, *others = make_turn_samples(rows, PromptsTask())
    assert sample.problem.startswith("data record 1 (log.jsonl:9): messages[1] is {'role': 'bot'")
    assert not sample.is_left_out
    assert len(others) == 3
    assert not others[0].problem
    assert make_refused_record(sample, "next_message").reason == sample.problem


def test_a_summary_counts_and_groups() -> None:
    two = [{"start": i, "end": i + 1, "label": 1} for i in range(2)]
    summary = summarize(
        [
            record("ok", spans=two, num_quotes=3, num_located=2, agreement=0.5),
            record("empty", spans=(), num_quotes=1, agreement=1.0),
            record("unparsable", reason="the answer is no JSON"),
            record("failed", reason="record 3 has no response"),
            record("failed", reason="record 17 has no response"),
        ]
    )
    assert summary == {
        "records": 5, "ok": 1, "empty": 1, "unparsable": 1, "failed": 2, "failed_share": pytest.approx(0.6),
        "spans_per_response": 1.0, "located_share": 0.5, "agreement": 0.75,
        "reasons": [(2, "record 3 has no response"), (1, "the answer is no JSON")],
    }  # fmt: skip
    assert format_summary(summary).splitlines() == [
        "5 records: 1 ok, 1 empty, 1 unparsable, 2 failed; 1.0 spans each; 50% of the quotes located; agreement 0.75",
        "  2 x record 3 has no response",
        "  1 x the answer is no JSON",
    ]
    left_out = [f"data record {number} has no reply" for number in (1, 12)]
    summary = summarize([record("ok")], left_out)
    assert summary["left_out"] == [(2, "data record 1 has no reply")]
    assert format_summary(summary).splitlines()[1:] == ["  left out: 2 x data record 1 has no reply"]
    nothing = summarize([record("failed")])
    assert (nothing["spans_per_response"], nothing["located_share"], nothing["agreement"]) == (None, None, None)
    assert format_summary(nothing) == "1 records: 1 failed\n  1 x status failed"


def test_only_the_sandboxes_modes_are_counted() -> None:
    """A user's function may have a mode of its own."""
    records = [record("ok", execution={"mode": mode}) for mode in (["fast"], None, "strict", "together")]
    summary = summarize(records)
    assert {name: value for name, value in summary.items() if name.startswith("sandbox_")} == {
        "sandbox_together_share": 1.0
    }


def test_text_that_no_file_can_hold_does_not_end_the_run() -> None:
    class Rude(FakeFeedback):
        async def judge(self, prompt: Prompt, response_text: str) -> Any:
            return replace(await super().judge(prompt, response_text), reason='quote "\ud800" does not occur')

    (record,) = asyncio.run(make_records(samples_of(ROWS[0]), Rude())).values()
    assert 'quote \\"\ufffd\\" does not occur' in record.model_dump_json()


def test_the_documented_record_has_every_field_and_says_what_it_shows() -> None:
    text = (Path(__file__).parents[2] / "t2g" / "README.md").read_text()
    line = text.split("```json\n")[1].split("```")[0]
    example = json.loads(line)
    assert list(example) == list(AnnotatedRecord.model_fields)
    rows = text.split("| field |")[1].split("\n\n")[0]
    assert {name for name in example if f"`{name}`" not in rows} == set()
    record = AnnotatedRecord.model_validate(example)
    feedback = make_feedback(record.critique, record.good, record.poor, record.response, source="", version="")
    assert feedback.spans == record.to_feedback().spans
