"""Several feedback sources as one: statuses, critiques under headings, spans with their criterion."""

import asyncio
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from t2g.config import AnnotateConfig, AnnotateJob, FeedbackConfig, PolicyJob
from t2g.config.field_annotations import can_change_on_resume, paths
from t2g.config.loading import identity_values, load
from t2g.errors import RunStopped, UserError
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.feedback.records import AnnotatedRecord, make_annotated_record, read_record, select_criterion
from t2g.feedback.sources.combined import CombinedFeedback, combine_feedback, make_source
from t2g.feedback.sources.make import make_local_source
from t2g.interfaces import FeedbackSource
from t2g.runs.identity import Identity
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import Prompt, Span, SpanFeedback, read_feedback

PROMPT = Prompt(prompt_id="7", prompt_text="Hi?", task="prompts")
RESPONSE = "a red bag"
FREE = ("timeout_s", "human_file", "concurrency", "llm.url")  # of a source of annotation
URL = "http://127.0.0.1:9/v1"
STATUSES = ("ok", "empty", "unparsable", "failed")


def answer(status: str, name: str = "x") -> SpanFeedback:
    if status in ("ok", "empty"):
        quotes = ["red"] if status == "ok" else []
        return make_feedback(f"{name} on red.", quotes, (), RESPONSE, source="program", version=f"v{name}")
    return make_failed_feedback(status, source="llm", version="m", reason=f"{name} lost")  # type: ignore[arg-type]


def facts(prompt: str, response: str) -> Any:
    return "The bag is right.", ["bag"], []


def style(prompt: str, response: str) -> Any:
    return "The bag is dull.", [], ["bag"]


def number(prompt: str, response: str) -> Any:
    return 5


def section(**sources: Any) -> FeedbackConfig:
    return FeedbackConfig.model_validate({"sources": sources})


def judge(config: FeedbackConfig) -> SpanFeedback:
    source = make_source(config, lambda one, section: make_local_source(one, PromptsTask(), section=section))
    return asyncio.run(source.judge(PROMPT, RESPONSE))


def test_critiques_have_headings_and_spans_their_criterion() -> None:
    feedback = judge(
        section(facts={"source": f"{__name__}:facts"}, style={"source": f"{__name__}:style", "weight": 0.5})
    )
    assert feedback.critique == "facts:\nThe bag is right.\n\nstyle:\nThe bag is dull."
    assert [(s.criterion, s.label, s.start, s.end) for s in feedback.spans] == [("facts", 1, 6, 9), ("style", -1, 6, 9)]
    parts = [feedback.critique[slice(*s.critique_range)] for s in feedback.spans if s.critique_range]
    assert parts == ["The bag is right.", "The bag is dull."]
    assert {name: feedback.critique[slice(*r.critique_range)] for name, r in feedback.criteria.items()} == {
        "facts": parts[0], "style": parts[1],
    }  # fmt: skip
    assert (feedback.status, feedback.source, feedback.num_quotes, feedback.num_located) == ("ok", "program", 2, 2)
    assert feedback.version == f"facts: {__name__}:facts; style: {__name__}:style"
    record = make_annotated_record(PROMPT, RESPONSE, feedback)
    back = read_record(json.loads(record.model_dump_json()))
    assert back.to_feedback() == feedback
    assert read_feedback(json.loads(json.dumps(asdict(feedback)))) == feedback


def test_a_single_criterion_only_names_its_spans() -> None:
    alone = judge(FeedbackConfig(source=f"{__name__}:facts"))
    named = judge(section(facts={"source": f"{__name__}:facts"}))
    assert named.spans == (Span(start=6, end=9, label=1, critique_range=(0, 17), criterion="facts"),)
    assert vars(named) | {"spans": ()} == vars(alone) | {"spans": ()}
    assert named.criteria == {}


@pytest.mark.parametrize(("first", "second"), [*product(STATUSES, STATUSES)])
@pytest.mark.parametrize("optional", [(), ("b",), ("a", "b")])
def test_status_of_two_criteria(first: str, second: str, optional: tuple[str, ...]) -> None:
    required = [name for name in ("a", "b") if name not in optional]
    combined = combine_feedback({"a": answer(first, "a"), "b": answer(second, "b")}, required)
    statuses = {"a": first, "b": second}
    usable = [name for name, status in statuses.items() if status in ("ok", "empty")]
    expected = "ok" if "ok" in statuses.values() else "empty"
    if not usable or any(name not in usable and name not in optional for name in statuses):
        lost = [status for name, status in statuses.items() if name not in usable]
        counted = [status for name, status in statuses.items() if name not in optional and name not in usable] or lost
        expected = "failed" if "failed" in counted else "unparsable"
    assert combined.status == expected
    assert {name: r.status for name, r in combined.criteria.items()} == statuses
    assert {s.criterion for s in combined.spans} == {name for name in usable if statuses[name] == "ok"}
    assert combined.critique == "\n\n".join(f"{name}:\n{name} on red." for name in usable)
    assert combined.reason == "; ".join(f"{name}: {name} lost" for name in statuses if name not in usable)


def test_another_type_of_one_criterion_is_a_sentence_and_the_other_counts_where_it_suffices() -> None:
    fine = {"source": f"{__name__}:facts"}
    wrong = {"source": f"{__name__}:number"}
    sentence = "number: the feedback function returned an invalid judgement: 5; it needs to be (critique, good pieces, "
    feedback = judge(section(facts=fine, number=wrong))
    assert feedback.status == "failed" and feedback.reason.startswith(sentence)
    feedback = judge(section(facts=fine, number=wrong | {"required": False}))
    assert feedback.status == "ok"
    assert feedback.reason.startswith(sentence)
    assert len(feedback.spans) == 1


def test_sources_run_concurrently_and_an_error_ends_the_others() -> None:
    both = asyncio.Event()
    cancelled = []

    class Waiting(FeedbackSource):
        name = "llm"
        fleet = "engines"

        async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
            await asyncio.wait_for(both.wait(), 5)
            return answer("ok")

    class Setting(FeedbackSource):
        name = "program"

        async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
            both.set()
            return answer("ok")

    class Stopping(FeedbackSource):
        name = "llm"

        async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
            raise RunStopped("no engine is left")

    class Hanging(FeedbackSource):
        name = "program"

        async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.append(1)
            return answer("ok")

    source = CombinedFeedback({"a": Waiting(), "b": Setting()}, ["a", "b"])
    assert (source.name, source.fleet) == ("llm+program", "engines")
    assert asyncio.run(source.judge(PROMPT, RESPONSE)).status == "ok"
    with pytest.raises(RunStopped):
        asyncio.run(CombinedFeedback({"a": Hanging(), "b": Stopping()}, ["a", "b"]).judge(PROMPT, RESPONSE))
    assert cancelled == [1]


# Config


LLM = {"source": "llm", "llm": {"model": "m"}}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sources": {"a": {"source": "program", "weight": 0}}}, r"sources\.a\.weight\s.*greater than 0"),
        ({"sources": {}}, "at least 1 item"),
        ({"sources": {"A b": {"source": "program"}}}, "should match pattern"),
        ({"sources": {"a": {"source": "human"}}}, "source=human needs human_file"),
        ({"sources": {"a": LLM}, "source": "program"}, r"sources and source are both set; .* sources\.NAME\.source"),
        ({"sources": {"a": LLM}, "llm": {"model": "m"}}, "sources and llm are both set"),
        ({"sources": {"a": LLM, "b": LLM}}, "a and b need engines of our own, and at most one"),
        ({"sources": {"a": {"source": "program", "noise": {"flip": 0.1}}}}, "Extra inputs"),
    ],
)
def test_a_wrong_mapping_is_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){sentence}"):
        FeedbackConfig(**fields)


def test_one_criterion_may_have_engines_of_our_own() -> None:
    server = {"source": "llm", "llm": {"model": "m", "url": URL}}
    reward = {"source": "reward_model", "reward_model": "m"}
    config = section(facts=reward, style=server)
    assert config.models == ("reward_model", "llm")
    assert config.engine_source == config.named_sources["facts"]
    assert config.describe() == "facts (reward_model), style (llm)"
    annotate = AnnotateConfig.model_validate(config.model_dump(include={"sources"}))
    assert annotate.engine_source == annotate.named_sources["facts"]
    assert FeedbackConfig.model_validate(config.model_dump()) == config, "as it is read from config.yaml"


ANNOTATE = """
data: {path: d.jsonl, columns: {prompt: q}}
annotate:
  sources:
    people: {source: human, human_file: FILE, timeout_s: 60}
    words: {source: llm, llm: {model: judge, url: "http://h/v1"}}
"""


def test_the_rules_of_annotation_hold_inside_the_mapping(tmp_path: Path) -> None:
    """A human source reads data.path by default, and what may change on resume is as in the short form."""

    def read(human_file: str, *overrides: str) -> AnnotateJob:
        (tmp_path / "a.yaml").write_text(ANNOTATE.replace("FILE", human_file))
        return load(AnnotateJob, tmp_path / "a.yaml", overrides, cwd=tmp_path)

    (tmp_path / "d.jsonl").touch()
    (tmp_path / "marks.jsonl").touch()
    people = read("null").annotate.named_sources["people"]
    assert (people.human_file, people.human_columns) == (f"{tmp_path}/d.jsonl", {"prompt": "q"})
    other = read("marks.jsonl").annotate.named_sources["people"]
    assert (other.human_file, other.human_columns) == (f"{tmp_path}/marks.jsonl", {})
    identity_keys = identity_values(read("null")).keys()
    assert {"annotate.sources.people.source", "annotate.sources.words.llm.model"} <= identity_keys
    assert not {f"annotate.sources.{name}.{key}" for name in ("people", "words") for key in FREE} & identity_keys
    assert all(can_change_on_resume(AnnotateJob, f"annotate.sources.any.{key}") for key in FREE)
    with pytest.raises(UserError, match="planted=1 adds responses that source=human lacks"):
        read("null", "annotate.planted=1")


POLICY = """
model: {policy: m}
data: {path: d.jsonl}
feedback:
  sources:
    facts: {source: "pkg.mod:facts", concurrency: 3, human_file: marks.jsonl}
    style: {source: llm, weight: 0.5, llm: {model: judge, url: "http://h/v1"}}
"""


def test_marks_of_fields_hold_inside_the_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marks.jsonl").write_text("{}")
    (tmp_path / "judge").mkdir()
    (tmp_path / "p.yaml").write_text(POLICY)
    job = load(PolicyJob, tmp_path / "p.yaml", ["feedback.sources.facts.weight=2"], cwd=tmp_path)
    assert job.feedback.weights == {"facts": 2, "style": 0.5}
    feedback_paths = {key: value for key, value in paths(job) if value and key.startswith("feedback")}
    assert feedback_paths == {"feedback.sources.facts.human_file": (str(tmp_path / "marks.jsonl"),)}, (
        "judge is a server's name"
    )
    identity_keys = identity_values(job).keys()
    assert {"feedback.sources.facts.source", "feedback.sources.style.weight"} <= identity_keys
    assert not {"feedback.sources.facts.concurrency", "feedback.sources.style.llm.url"} & identity_keys
    assert can_change_on_resume(PolicyJob, "feedback.sources.any.llm.concurrency")
    assert not can_change_on_resume(PolicyJob, "feedback.sources.any.llm.temperature")
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "mod.py").write_text("def facts(prompt, response):\n    return '', [], []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    contents = Identity.from_config(job).contents
    assert {"feedback.sources.facts.source", "feedback.sources.facts.human_file"} <= contents.keys()
    assert [*job.feedback_sections] == ["feedback.sources.facts", "feedback.sources.style"]
    engines = load(PolicyJob, tmp_path / "p.yaml", ["feedback.sources.style.llm.url=null"], cwd=tmp_path)
    assert [*engines.roles()] == ["rollout", "learner", "feedback.sources.style.engine"]


@pytest.mark.parametrize(
    ("text", "override", "sentence"),
    [
        ("    facts: {source: program}\n", "", r"p\.yaml:8: feedback\.sources\.facts is given twice, first in line 6"),
        ("", "feedback.sources={a: {source: program}, a: {source: program}}", r"feedback\.sources\.a is given twice"),
        ("", "feedback.sources.facts.weight=0", r"feedback\.sources\.facts\.weight: got 0, needs greater than 0"),
        ("", "feedback.sources.facts.wieght=1", r"did you mean feedback\.sources\.facts\.weight"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, text: str, override: str, sentence: str) -> None:
    (tmp_path / "p.yaml").write_text(POLICY + text)
    with pytest.raises(UserError, match=sentence):
        load(PolicyJob, tmp_path / "p.yaml", [override] if override else [], cwd=tmp_path)


# Records


def records() -> list[AnnotatedRecord]:
    answers = [("ok", "ok"), ("ok", "failed"), ("failed", "empty")]
    return [
        make_annotated_record(PROMPT, RESPONSE, combine_feedback({"a": answer(a, "a"), "b": answer(b, "b")}, ["a"]))
        for a, b in answers
    ]


def test_a_reward_model_learns_one_criterion_that_is_named() -> None:
    with pytest.raises(UserError, match=r"d\.jsonl: its records have the criteria a, b, and criterion is None; set"):
        select_criterion(records(), None, "d.jsonl")
    with pytest.raises(UserError, match="its records have the criteria a, b, and criterion is c"):
        select_criterion(records(), "c", "d.jsonl")
    plain = make_annotated_record(PROMPT, RESPONSE, answer("ok"))
    assert select_criterion([plain], None, "d.jsonl") == [plain]
    with pytest.raises(UserError, match="its records have no criteria, and criterion is a"):
        select_criterion([plain], "a", "d.jsonl")
    chosen = select_criterion(records(), "b", "d.jsonl")
    assert [(r.status, r.critique, len(r.good)) for r in chosen] == [
        ("ok", "b on red.", 1), ("failed", "", 0), ("empty", "b on red.", 0),
    ]  # fmt: skip
    assert chosen[0].critique[slice(*chosen[0].spans[0].critique_range or ())] == "b on red."
