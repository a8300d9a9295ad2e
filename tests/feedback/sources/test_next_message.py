"""Replies as critiques: what finds their spans, and which configs are refused."""

import asyncio
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from t2g.config import AnnotateConfig, FeedbackConfig, PolicyJob
from t2g.errors import UserError
from t2g.feedback.sources.make import make_local_source
from t2g.feedback.sources.next_message import NextMessageFeedback
from t2g.feedback.sources.program import ProgramFeedback
from t2g.tasks.base import get_task
from t2g.tasks.tiny import world
from t2g.types import Prompt, Span, SpanFeedback

RESPONSE = "sum(values) / length(values)"
REPLY = "`length` is not defined. Use len."
PROMPT = Prompt(prompt_id="7/1", prompt_text="A mean?", task="prompts", payload={"next_message": REPLY})


def locate(prompt: str, response: str, critique: str) -> tuple[str, list[str], list[Any]]:
    """A function for `align`."""
    return critique, [], [Span(start=14, end=20, label=-1, severity=2, critique_range=(1, 7))] * ("length" in critique)


def judge(prompt: str, response: str) -> dict[str, Any]:
    """A feedback function, with a critique and a result of its own."""
    poor = {"quote": "length", "severity": 3, "fix": "len"}
    return {"critique": "By no means: length.", "good": ["sum"], "poor": [poor], "execution": {"passed": False}}


def raising(prompt: str, response: str) -> None:
    raise KeyError("facts")


def text_alone(prompt: str, response: str) -> str:
    return REPLY


def judged(prompt: Prompt = PROMPT, response: str = RESPONSE, task: str = "prompts", **fields: Any) -> SpanFeedback:
    config = AnnotateConfig.model_validate({"source": "next_message"} | fields)
    return asyncio.run(make_local_source(config, get_task(task)).judge(prompt, response))


def test_without_an_aligner_the_reply_is_a_critique_without_spans() -> None:
    feedback = judged()
    assert (feedback.critique, feedback.spans, feedback.status, feedback.source, feedback.version) == (
        REPLY,
        (),
        "empty",
        "next_message",
        "",
    )


def test_a_function_finds_what_the_reply_is_about() -> None:
    feedback = judged(align=f"{__name__}:locate")
    assert feedback.spans == (Span(start=14, end=20, label=-1, severity=2, critique_range=(1, 7)),)
    assert (feedback.critique, feedback.status, feedback.source, feedback.version) == (
        REPLY,
        "ok",
        "next_message",
        f"{__name__}:locate",
    )


def test_a_feedback_function_gives_its_spans_to_the_reply() -> None:
    feedback = judged(align=f"{__name__}:judge")
    assert feedback.critique == REPLY and feedback.execution == {"passed": False}
    good, poor = feedback.spans  # the reply's sentence, not that of the function's critique
    assert (good.start, good.end, good.label, good.critique_range) == (0, 3, 1, None)
    assert (poor.start, poor.severity, poor.fix, poor.critique_range) == (14, 3, "len", (0, REPLY.index(" Use")))


def test_the_task_s_own_program_finds_the_spans() -> None:
    facts = world.sample_facts(np.random.default_rng(0), heldout=False)
    prompt = Prompt(prompt_id="1", prompt_text="p", task="tiny", payload={"facts": facts, "next_message": "No laptop!"})
    response = "I bought a submarine. I bought a submarine."
    expected = asyncio.run(
        make_local_source(AnnotateConfig(source="program"), get_task("tiny")).judge(prompt, response)
    )
    feedback = judged(prompt, response, task="tiny", align="program")
    assert expected.spans
    assert [(s.start, s.end, s.label) for s in feedback.spans] == [(s.start, s.end, s.label) for s in expected.spans]
    assert feedback.critique == "No laptop!" and feedback.source == "next_message"
    with pytest.raises(UserError, match="task prompts has no program of its own"):
        judged(align="program")


@pytest.mark.parametrize("payload", [{}, {"next_message": None}, {"next_message": " "}])
def test_a_response_without_a_reply_has_failed_feedback(payload: dict[str, Any]) -> None:
    prompt = Prompt(prompt_id="7/2", prompt_text="A mean?", task="prompts", payload=payload)
    feedback = asyncio.run(NextMessageFeedback().judge(prompt, RESPONSE))
    assert feedback.status == "failed" and feedback.reason == "no message follows the response to prompt 7/2"


def test_a_function_may_align_other_critiques_too() -> None:
    feedback = judged(source=f"{__name__}:text_alone", align=f"{__name__}:locate")
    assert feedback.critique == REPLY
    assert [(s.start, s.end) for s in feedback.spans] == [(14, 20)]
    assert feedback.version == f"{__name__}:text_alone, {__name__}:locate"
    assert feedback.source == "program"


def test_a_failed_aligner_fails_the_judgement_and_keeps_the_critique() -> None:
    feedback = judged(align=f"{__name__}:raising")
    assert feedback.status == "failed" and feedback.critique == REPLY
    assert "raised KeyError" in feedback.reason


def test_an_aligner_that_returns_a_text_alone_ends_the_run() -> None:
    with pytest.raises(UserError, match=r"critique alone, on prompt \S+: return \(critique, good pieces"):
        judged(align=f"{__name__}:text_alone")


def test_only_an_aligner_may_need_the_critique() -> None:
    ProgramFeedback(f"{__name__}:locate", field="align")
    with pytest.raises(UserError, match=r"annotate\.source=.*locate cannot be called with"):
        ProgramFeedback(f"{__name__}:locate", section="annotate")
    with pytest.raises(UserError, match=r"annotate\.align=my\.module:f cannot be imported"):
        judged(align="my.module:f")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"align": "people"}, "align='people' is neither one of reward_model, llm, program nor an import path"),
        ({"align": "human"}, "align='human' is neither one of"),
        ({"align": "reward_model"}, "align=reward_model needs reward_model"),
        ({"planted": 0.5}, r"planted=0\.5 adds responses that source=next_message lacks"),
        ({"responses": "policy"}, "responses=policy samples responses that have no next message"),
        (
            {"source": "llm", "llm": {"model": "m"}, "style": {"spans": False}, "align": "a:b"},
            "align needs to be llm or",
        ),
    ],
)
def test_configs_that_cannot_work_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        AnnotateConfig.model_validate({"source": "next_message"} | fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"feedback": {"source": "next_message"}},
            r"feedback\.source=next_message needs the replies of an environment",
        ),
        ({"environment": "a:B", "feedback": {"source": "program"}}, r"program judges one response"),
        (
            {"environment": "a:B", "feedback": {"source": "c:d", "align": "program"}},
            "program judges one response",
        ),
        (
            {"environment": "a:B", "feedback": {"sources": {"x": {"source": "next_message"}}}},
            r"feedback\.sources has next_message, which judges each turn",
        ),
        (
            {"environment": "a:B", "feedback": {"source": "c:d"}, "objective": {"teacher": {}}},
            r"objective\.teacher answers a prompt",
        ),
    ],
)
def test_what_training_on_conversations_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PolicyJob.model_validate({"model": {"policy": "m"}, "data": {"path": "d"}} | changes)


def test_next_messages_are_credited_to_their_own_turn() -> None:
    job = {"model": {"policy": "m"}, "data": {"path": "d"}, "environment": "a:B"}

    def gamma(source: str, **objective: Any) -> float:
        changes = {"feedback": {"source": source, "align": "a:b"}, "objective": objective}
        return PolicyJob.model_validate(job | changes).objective.turn_gamma

    assert (gamma("next_message"), gamma("c:d"), gamma("next_message", turn_gamma=1)) == (0, 1, 1)
    placements = ("span", "step", "scalar", "shuffled")
    by_placement = [gamma("next_message", rewards={"placement": placement}) for placement in placements]
    assert by_placement == [0, 0, 1, 1], "a number at the last token pays all turns"


def test_a_model_that_aligns_replies_is_served() -> None:
    by_model = {"source": "next_message", "align": "reward_model", "reward_model": "m"}
    assert FeedbackConfig.model_validate(by_model).engine_model == "reward_model"
    by_function = FeedbackConfig(source="next_message", align="a:b")
    assert (by_function.engine_model, by_function.models, by_function.aligner) == (None, (), "a:b")
