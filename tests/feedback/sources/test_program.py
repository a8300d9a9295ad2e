"""A user's feedback function in the loop: what it returns, what it may break, and what it cannot."""

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_clock import LoopClock

from t2g.config import AnnotateConfig, FeedbackConfig
from t2g.errors import RunStopped, UserError
from t2g.feedback.parse import MAX_ANSWER_CHARS, MAX_QUOTES, make_failed_feedback, make_feedback
from t2g.feedback.sources import user_function
from t2g.feedback.sources.make import make_local_source
from t2g.feedback.sources.program import ProgramFeedback
from t2g.tasks.base import get_task
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import Prompt, Span, SpanFeedback

PROMPT = Prompt(
    prompt_id="7", prompt_ids=np.zeros(0, np.int32), prompt_text="Hi?", task="prompts", payload={"fact": "phone"}
)
RUNNING: list[int] = []  # how many functions ran at once, seen by each
CLOCKS: list[LoopClock] = []  # of the event loops, the last one runs


def plain(prompt: str, response: str) -> tuple[str, list[str], list[tuple[str, int]]]:
    return f"{prompt} {response}", ["a phone"], [("phone", 2)]


def with_payload(prompt: str, response: str, *, payload: dict[str, Any]) -> dict[str, Any]:
    return {"critique": "", "good": [payload["fact"]], "poor": []}


def with_outcome(prompt: str, response: str) -> dict[str, Any]:
    return {"critique": "", "good": [], "poor": [], "execution": {"passed": False, "tests": ["a"]}}


def raising(prompt: str, response: str) -> None:
    raise KeyError("facts")


def quoting(prompt: str, response: str) -> None:
    raise ValueError("no number in \x1b]52;c;eA==\x07")


def leaving(prompt: str, response: str) -> None:
    sys.exit(3)


def invalid(prompt: str, response: str) -> Any:
    return 3


def raising_later(prompt: str, response: str) -> Any:
    def quotes() -> Iterator[str]:
        yield "phone"
        raise OSError("the connection is gone")

    return "c", quotes(), []


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __str__


def unspeakable(prompt: str, response: str) -> Any:
    raise Unspeakable


def unspeakable_answer(prompt: str, response: str) -> Any:
    return Unspeakable()


def endless(prompt: str, response: str) -> Any:
    return "c", itertools.repeat("phone"), []


def number_as_quote(prompt: str, response: str) -> Any:
    return "c", [5], []


def quotes_that_hang(prompt: str, response: str) -> Any:
    return "c", (word for word in iter(threading.Event().wait, False)), []


HANGING: list[int] = []  # one for each call


def hanging(prompt: str, response: str) -> Any:
    HANGING.append(1)
    threading.Event().wait()


def hanging_on_demand(prompt: str, response: str) -> Any:
    """Hang for longer than a call has on the event loop's clock."""
    if response == "hang":
        CLOCKS[-1].skip(60)
        threading.Event().wait()
    return "c", [], []


def slow(prompt: str, response: str) -> Any:
    """Take 18 s of the event loop's clock, and say how many calls run."""
    RUNNING.append(1)
    CLOCKS[-1].skip(18)
    time.sleep(0.02)
    num_running = len(RUNNING)
    RUNNING.pop()
    return str(num_running), [], []


not_a_function = 3


def source(name: str, timeout_s: float = 5.0) -> ProgramFeedback:
    return ProgramFeedback(f"{__name__}:{name}", timeout_s=timeout_s)


def judge(source: ProgramFeedback, response: str = "a phone, a phone") -> SpanFeedback:
    return asyncio.run(source.judge(PROMPT, response))


def test_a_plain_function() -> None:
    feedback = judge(source("plain"))
    assert feedback.critique == "Hi? a phone, a phone"
    assert feedback.spans == (
        Span(start=0, end=7, label=1, critique_range=(4, 20)),
        Span(start=11, end=16, label=-1, critique_range=(4, 20)),
    )
    assert (feedback.status, feedback.source, feedback.version) == ("ok", "program", f"{__name__}:plain")


def test_a_function_that_wants_the_payload_gets_it() -> None:
    assert [(s.start, s.end) for s in judge(source("with_payload")).spans] == [(2, 7)]


def with_messages(prompt: str, response: str, messages: list[dict[str, str]]) -> Any:
    messages[0]["content"] += "!"  # must not reach the next call
    return " ".join(f"{message['role']}: {message['content']}" for message in messages), [], []


def with_all(prompt: str, response: str, **options: Any) -> Any:
    return f"{options['payload']['fact']} {len(options['messages'])} {[*options]}", [], []


def test_a_function_that_wants_the_messages_gets_a_copy() -> None:
    chat = ({"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi?"})
    prompt = replace(PROMPT, messages=chat)
    program = source("with_messages")
    answers = [asyncio.run(program.judge(prompt, "a")).critique for _ in range(2)]
    assert answers == ["system: Be brief! user: Hi?"] * 2
    assert judge(program).critique == "user: Hi?!", "without messages, the text of the prompt"
    assert judge(source("with_all")).critique == "phone 1 ['payload', 'messages', 'data_file']"


@pytest.mark.parametrize("section", ["feedback", "annotate"])
def test_messages_name_the_section_of_the_function(section: str, caplog: pytest.LogCaptureFixture) -> None:
    config = {"feedback": FeedbackConfig, "annotate": AnnotateConfig}[section]

    def make(name: str, timeout_s: float = 20) -> Any:
        return make_local_source(config(source=f"{__name__}:{name}", timeout_s=timeout_s), PromptsTask())

    for name, reason in (
        ("missing", "cannot be imported"),
        ("not_a_function", "has the type"),
        ("one_argument", "cannot be"),
    ):
        with pytest.raises(UserError, match=rf"^{section}\.source={__name__}:{name} {reason}"):
            make(name)
    assert judge(make("hanging", timeout_s=0.05)).reason.endswith(f"no answer within {section}.timeout_s=0.05")
    judge(make("with_score"))
    assert f"{section}.source={__name__}:with_score: the feedback function returned an invalid judgement" in caplog.text
    assert "a dict with the unknown key 'score'" in caplog.text
    task_program = make_local_source(config(source="program", timeout_s=0.05), HangingTask())
    assert judge(task_program).reason.endswith(f"no answer within {section}.timeout_s=0.05")
    assert f"{section}.source=program: the feedback function gave no answer" in caplog.text


class HangingTask(PromptsTask):
    def make_feedback_function(self, **options: Any) -> Any:
        return hanging


def one_argument(prompt: str) -> Any:
    return "", [], []


def with_score(prompt: str, response: str) -> Any:
    return {"critique": "", "good": [], "poor": [], "score": 3}


def test_an_outcome_goes_into_the_feedback() -> None:
    assert judge(source("with_outcome")).execution == {"passed": False, "tests": ["a"]}


def test_a_function_instead_of_its_path() -> None:
    feedback = judge(ProgramFeedback(plain))
    assert (feedback.status, feedback.version) == ("ok", f"{__name__}:plain")


def make_function(word: str) -> Any:
    def feedback_function(prompt: str, response: str, *, payload: dict[str, Any]) -> Any:
        return word, [payload["fact"]], []

    return feedback_function


def test_a_function_that_a_function_made_is_known_by_its_maker() -> None:
    feedback = judge(ProgramFeedback(make_function("well")))
    assert (feedback.critique, len(feedback.spans), feedback.version) == ("well", 1, f"{__name__}:make_function")


class Aligner:
    """Blames the first word that critique and response share; without one it fails."""

    fleet = "engines"
    judgement_cache_key = "aligner#1"

    def __init__(self) -> None:
        self.critiques: list[str] = []

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        self.critiques.append(critique)
        words = [word for word in response_text.split() if word in critique.split()]
        if not words:
            return make_failed_feedback("failed", source="llm", version="m", reason="no shared word")
        return make_feedback("", (), words[:1], response_text, source="llm", version="m")


def text_alone(prompt: str, response: str) -> Any:
    texts = {"": "", "blank": " ", "long": "x" * (MAX_ANSWER_CHARS + 1)}
    return texts.get(response, "The bag is wrong \udc80")


async def text_alone_async(prompt: str, response: str) -> Any:
    return text_alone(prompt, response)


@pytest.mark.parametrize("function", [text_alone, text_alone_async])
def test_the_spans_of_a_text_alone_are_the_aligners(function: Any) -> None:
    aligner = Aligner()
    source = ProgramFeedback(function, aligner=aligner)
    assert source.fleet == "engines", "the loop supervises the engines of the aligner"

    def judged(response: str) -> SpanFeedback:
        return asyncio.run(source.judge(PROMPT, response))

    feedback = judged("a bag")
    assert feedback.spans == (Span(start=2, end=5, label=-1, critique_range=None),)
    assert feedback.status == "ok"
    assert (feedback.critique, feedback.source, feedback.num_quotes) == ("The bag is wrong \ufffd", "program", 1)
    assert feedback.version == f"{__name__}:{function.__name__}, m"
    lost = judged("a phone")
    assert (lost.status, lost.reason, lost.critique) == ("failed", "no shared word", feedback.critique)
    assert (judged("").status, judged("blank").status) == ("empty", "empty")
    assert len(aligner.critiques) == 2
    assert "at most 65536" in judged("long").reason


def test_a_text_alone_without_an_aligner_ends_the_run_and_names_the_key() -> None:
    with pytest.raises(UserError, match=r"critique alone, on prompt 7: feedback\.align=llm or reward_model finds"):
        asyncio.run(ProgramFeedback(text_alone).judge(PROMPT, "a bag"))


def test_an_empty_response() -> None:
    assert judge(source("plain"), "").status == "unparsable"  # it quotes words that are not there


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raising", "raised KeyError: 'facts'"),
        ("quoting", "raised ValueError: no number in ␛]52;c;eA==␇"),  # a terminal would execute it
        ("leaving", "raised SystemExit: 3"),
        ("invalid", "returned an invalid judgement: 3; it needs to be"),
        ("raising_later", "raised OSError: the connection is gone"),
        ("unspeakable", "Unspeakable"),
        ("unspeakable_answer", "raised ZeroDivisionError"),
        ("number_as_quote", "returned an invalid judgement: 5 is neither a quote"),
    ],
)
def test_a_function_that_misbehaves_is_failed_and_said_once(
    name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = source(name)
    with caplog.at_level(logging.WARNING):
        first = judge(program)
        second = judge(program)
    assert first.status == second.status == "failed"
    assert first.reason.startswith("the feedback function ") and reason in first.reason
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]
    assert "prompt 7" in caplog.messages[0]


@pytest.mark.parametrize("name", ["hanging", "quotes_that_hang"])
def test_a_function_that_hangs_is_failed_within_its_time(name: str, caplog: pytest.LogCaptureFixture) -> None:
    failed = judge(source(name, timeout_s=0.05))
    assert (failed.status, failed.reason) == (
        "failed",
        "the feedback function gave no answer within feedback.timeout_s=0.05",
    )
    assert "timeout_s=0.05" in caplog.messages[0]


def test_quotes_without_end_are_cut() -> None:
    feedback = judge(source("endless"), "a phone")
    assert (feedback.status, len(feedback.spans), feedback.num_quotes) == ("ok", 1, MAX_QUOTES + 1)


def test_the_third_hang_in_a_row_stops_the_run() -> None:
    program = source("hanging", timeout_s=0.05)

    async def step() -> None:
        await asyncio.gather(*(program.judge(PROMPT, "x") for _ in range(64)))

    HANGING.clear()
    with pytest.raises(
        RunStopped, match=r"test_program:hanging: the feedback function gave no answer 3 times in a row, in 0\.05 s"
    ):
        asyncio.run(step())
    with pytest.raises(RunStopped):
        judge(program)
    assert len(HANGING) == 3, "without another call"


def test_hangs_that_are_not_in_a_row_do_not_stop_the_run() -> None:
    program = source("hanging_on_demand", timeout_s=30)

    async def judge_on_a_clock(response: str) -> SpanFeedback:
        CLOCKS.append(LoopClock())
        return await program.judge(PROMPT, response)

    answers = [asyncio.run(judge_on_a_clock(response)) for response in ("hang", "hang", "x", "hang", "hang", "x")]
    statuses = [answer.status for answer in answers]
    assert statuses == ["failed", "failed", "empty"] * 2


def test_calls_come_one_at_a_time_and_their_time_counts_from_their_turn() -> None:
    program = source("slow", timeout_s=30)

    async def many() -> list[SpanFeedback]:
        CLOCKS.append(LoopClock())
        return await asyncio.gather(*(program.judge(PROMPT, "x") for _ in range(5)))  # 90 s in all

    answers = asyncio.run(many())
    assert {answer.critique for answer in answers} == {"1"}
    assert {answer.critique for answer in asyncio.run(many())} == {"1"}  # in another loop too


DEFAULT = FeedbackConfig(source=f"{__name__}:plain").concurrency
BARRIER = threading.Barrier(DEFAULT)
ASYNC_BARRIER = asyncio.Barrier(DEFAULT)


def waits_for_others(prompt: str, response: str) -> Any:
    BARRIER.wait(10)  # passes only when all calls are inside
    return "passed", [], []


async def async_waits_for_others(prompt: str, response: str) -> Any:
    async with asyncio.timeout(10):
        await ASYNC_BARRIER.wait()
    return "passed", [], []


@pytest.mark.parametrize("name", ["waits_for_others", "async_waits_for_others"])
def test_as_many_calls_run_at_once_as_the_config_says(name: str) -> None:
    source = make_local_source(FeedbackConfig(source=f"{__name__}:{name}", timeout_s=20), PromptsTask())

    async def many() -> list[SpanFeedback]:
        return await asyncio.gather(*(source.judge(PROMPT, "x") for _ in range(2 * DEFAULT)))

    assert [feedback.critique for feedback in asyncio.run(many())] == ["passed"] * 2 * DEFAULT


LOOPS: list[asyncio.AbstractEventLoop] = []
RELEASE = threading.Event()


async def async_with_payload(prompt: str, response: str, *, payload: dict[str, Any]) -> dict[str, Any]:
    LOOPS.append(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return {"critique": "", "good": [payload["fact"]], "poor": []}


async def blocking(prompt: str, response: str) -> Any:
    return str(RELEASE.wait(10)), [], []


async def async_raising(prompt: str, response: str) -> None:
    raise asyncio.CancelledError if response == "cancel" else KeyError("facts")


async def async_hanging(prompt: str, response: str) -> None:
    await asyncio.Event().wait()


def test_async_calls_share_one_loop_across_loops_of_the_driver() -> None:
    program = source("async_with_payload")
    for _ in range(2):
        (judged,) = judge(program).spans
        assert (judged.start, judged.end) == (2, 7)
    assert LOOPS[0] is LOOPS[1]


def test_blocking_code_in_an_async_function_does_not_block_the_driver() -> None:
    async def driver() -> SpanFeedback:
        judgement = asyncio.ensure_future(source("blocking").judge(PROMPT, "x"))
        await asyncio.sleep(0.05)
        RELEASE.set()  # by the driver's loop, while the function blocks
        return await judgement

    assert asyncio.run(driver()).critique == "True"


@pytest.mark.parametrize(("response", "kind"), [("x", "KeyError"), ("cancel", "CancelledError")])
def test_an_async_function_that_raises_is_failed_feedback(response: str, kind: str) -> None:
    feedback = judge(source("async_raising"), response)
    assert feedback.status == "failed" and kind in feedback.reason


async def async_blocked(prompt: str, response: str) -> None:
    threading.Event().wait()


@pytest.mark.parametrize("function", [async_hanging, async_blocked])
def test_concurrent_timeouts_count_once_and_three_rounds_stop_the_run(function: Any) -> None:
    program = ProgramFeedback(function, timeout_s=0.05, concurrency=8)

    async def step(calls: int) -> list[SpanFeedback]:
        return await asyncio.gather(*(program.judge(PROMPT, "x") for _ in range(calls)))

    assert {feedback.status for feedback in asyncio.run(step(8))} == {"failed"}
    with pytest.raises(RunStopped, match="3 times in a row"):
        asyncio.run(step(64))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module_at_all:f", "No module named"),
        ("json:no_such_function", "no attribute"),
        (f"{__name__}:not_a_function", "has the type int; it needs to be a function"),
    ],
)
def test_an_import_path_that_does_not_resolve(path: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        ProgramFeedback(path)


def test_a_module_that_breaks_while_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "broken_function_module.py").write_text("1 / 0\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(UserError, match="ZeroDivisionError"):
            ProgramFeedback("broken_function_module:f")
    finally:
        sys.path.remove(str(tmp_path))


def test_the_factory_makes_it() -> None:
    source = make_local_source(FeedbackConfig(source=f"{__name__}:plain"), PromptsTask())
    assert judge(source).status == "ok"  # type: ignore[arg-type]


def test_the_traceback_of_each_kind_of_error_lies_in_the_run_folder(tmp_path: Path) -> None:
    def feedback_function(prompt: str, response: str) -> None:
        raise KeyError("word " * 200) if response == "key" else ZeroDivisionError("by nothing")

    source = ProgramFeedback(feedback_function, log=tmp_path / "run" / "feedback.log")
    reasons = [asyncio.run(source.judge(PROMPT, text)).reason for text in ("key", "zero", "zero")]
    log_text = (tmp_path / "run" / "feedback.log").read_text()
    assert log_text.count("ZeroDivisionError: by nothing") == 1 and log_text.count("Traceback") == 2
    assert "in feedback_function" in log_text
    assert str(tmp_path) in reasons[0]
    assert str(tmp_path) not in reasons[2]
    assert "word …" in reasons[0], "no message is cut within a word"


def test_secrets_in_an_error_of_a_function_are_masked_in_reason_log_and_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One secret is the value of an environment variable, one has the form of a key, one is cut by the reason's end."""
    monkeypatch.setenv("JUDGE_API_KEY", "plain-words-as-a-key")
    secrets = ("plain-words-as-a-key", "sk-proj-12345678abcd")

    def feedback_function(prompt: str, response: str) -> Any:
        if response == "returned":
            return {secrets[0]: 1}
        try:
            raise KeyError(f"Incorrect API key provided: {secrets[0]}")
        except KeyError as error:
            raise ValueError("x " * (140 if response == "cut" else 0) + " ".join(secrets)) from error

    source = ProgramFeedback(feedback_function, log=tmp_path / "feedback.log")
    reasons = [asyncio.run(source.judge(PROMPT, response)).reason for response in ("raised", "cut", "returned")]
    written = [*reasons, caplog.text, (tmp_path / "feedback.log").read_text()]
    assert all("***" in text for text in written)
    assert not any(secret[:10] in text for text in written for secret in secrets)


def test_a_secret_in_the_error_of_an_import_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_with_a_key.py").write_text("raise OSError('no access with sk-proj-12345678abcd')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for load in (ProgramFeedback, get_task):
        with pytest.raises(UserError, match=r"OSError: no access with \*\*\*"):
            load("module_with_a_key:f")


class Flaky:
    """Raises at the first calls, as for a server's rate limit."""

    def __init__(self, num_failures: int, answer: Any = ("It is fine.", [], [])) -> None:
        self.num_failures = num_failures
        self.answer = answer
        self.num_calls = 0

    def __call__(self, prompt: str, response: str) -> Any:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise ConnectionError("HTTP 429: slow down")
        return self.answer


@pytest.mark.parametrize(
    ("flaky", "status", "num_calls"),
    [
        (Flaky(3), "empty", 4),
        (Flaky(9), "failed", 4),
        (Flaky(0, answer=7), "failed", 1),  # another form would come again
    ],
)
def test_a_function_that_raised_is_called_again_with_growing_pauses(
    flaky: Flaky, status: str, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_function, "BACKOFF_S", 0.01)
    source = ProgramFeedback(flaky, retries=3)
    started = time.monotonic()
    feedback = asyncio.run(source.judge(PROMPT, "x"))
    assert (feedback.status, flaky.num_calls) == (status, num_calls)
    assert time.monotonic() - started >= (0.5 * (0.01 + 0.02 + 0.04) if num_calls == 4 else 0)


def test_the_config_sets_the_retries() -> None:
    config = FeedbackConfig(source=f"{__name__}:raising_twice", retries=2)
    assert judge(make_local_source(config, PromptsTask())).status == "empty"  # type: ignore[arg-type]


RAISED: list[str] = []


def raising_twice(prompt: str, response: str) -> Any:
    RAISED.append(response)
    if len(RAISED) < 3:
        raise ConnectionError("HTTP 429")
    return "It is fine.", [], []
