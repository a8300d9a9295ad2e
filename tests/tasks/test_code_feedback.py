"""From an outcome to a critique and to lines: by hand, and on the hand-written records with their seeded faults."""

import json
from pathlib import Path
from typing import Any

import pytest

from t2g.config import StyleConfig
from t2g.environments.code_repair import CodeRepair
from t2g.errors import UserError
from t2g.feedback.fixes import apply_fixes
from t2g.feedback.parse import make_quote, read_judgement
from t2g.sandbox import Outcome, SandboxConfig, TestResult, run_solution
from t2g.tasks import code_feedback
from t2g.tasks.code import CodeTask
from t2g.tasks.code_feedback import (
    find_blamed_lines,
    find_code_lines,
    find_default_lines,
    find_omissions,
    find_praised_lines,
    format_critique,
    make_feedback_function,
    ochiai,
)
from t2g.types import Prompt, Span, SpanFeedback

RECORDS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "kodcode.jsonl").read_text(encoding="utf-8").splitlines()
]
LIMITS = SandboxConfig(timeout_s=30)  # a busy machine starts a program in seconds
TESTS = "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(-2) == 3\n"


def judged(response: str, tests: str = TESTS, *, limits: SandboxConfig = LIMITS, **style: Any) -> dict[str, Any]:
    return make_feedback_function(limits, StyleConfig(**style))("question", response, payload={"test": tests})


def feedback(response: str, judgement: dict[str, Any]) -> SpanFeedback:
    return read_judgement(judgement, response, source="program", version="v")


def quotes(response: str, side: list[Span]) -> list[Any]:
    return [make_quote(response, span).model_dump() for span in side]


def quoted(response: str, feedback_of_code: SpanFeedback, label: int) -> list[tuple[int, str]]:
    """(line of the response, text) of every span with that label."""
    spans = [span for span in feedback_of_code.spans if span.label == label]
    return [(response.count("\n", 0, span.start) + 1, response[span.start : span.end]) for span in spans]


@pytest.mark.parametrize(
    ("returned", "expected", "fix"),
    [
        ("2", ["3", "3"], "return 3"),
        ('"a"', ["'b'", "'b'"], "return 'b'"),
        ("2", ["3", "4"], None),  # no constant is right
        ("2", ["3", "2"], None),  # another test passes with this line
        ("x", ["3", "3"], None),
        ("2", ["'a b'", "'a b'"], None),  # a result does not keep its blanks
        ("2", ["'" + "a" * 400 + "'"] * 2, None),  # nor all of its characters
    ],
)
def test_a_constant_has_the_fix_that_every_test_expects(returned: str, expected: list[str], fix: str | None) -> None:
    tests = "from solution import f\n" + "".join(
        f"\ndef test_{i}():\n    assert f({i}) == {value}\n" for i, value in enumerate(expected)
    )
    response = f"def f(x):\n    return {returned}\n"
    code_feedback = feedback(response, judged(response, tests))
    assert [span.fix for span in code_feedback.spans if span.label == -1] == [fix]
    if fix:
        assert judged(apply_fixes(response, code_feedback.spans), tests)["execution"]["passed"]


def test_a_constant_without_its_own_value_in_the_results_has_no_fix() -> None:
    response = "def f(x):\n    return 2\n"
    tests = "from solution import f\n\ndef test():\n    assert f(1) + 1 == 5\n"
    assert [span.fix for span in feedback(response, judged(response, tests)).spans] == [None]


def test_each_case_that_a_program_gets_right_is_praised() -> None:
    """Otherwise programs with four and with two right cases would get the same reward."""
    tests = "from solution import f\n" + "".join(
        f"\ndef test_{k}():\n    assert f({k}) == {10 * k}\n" for k in range(1, 6)
    )
    for cases in range(1, 6):
        lines = [f"    if k == {k}:\n        return {10 * k}\n" for k in range(1, cases + 1)]
        response = "def f(k):\n" + "".join(lines) + "    return 0\n"
        judgement = judged(response, tests)
        assert quotes(response, judgement["good"]) == [f"return {10 * k}" for k in range(1, cases + 1)]
        assert [response[s.start : s.end] for s in judgement["poor"]] == (["return 0"] if cases < 5 else [])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["question_id"])
def test_poor_spans_hit_the_seeded_lines(record: dict[str, Any]) -> None:
    response = record["solution"]
    judgement = judged(response, record["test"])
    code_feedback = feedback(response, judgement)
    assert code_feedback.num_located == code_feedback.num_quotes
    poor = [line for line, _ in quoted(response, code_feedback, -1)]
    assert bool(poor) == bool(record["faulty_lines"])
    assert set(poor) <= set(record["faulty_lines"])
    assert {span.severity for span in code_feedback.spans if span.label == -1} <= {3}
    assert code_feedback.execution["passed"] is (not record["faulty_lines"])
    assert all(span.critique_range is not None for span in code_feedback.spans)


def test_a_program_in_a_fence() -> None:
    """Quotes are pieces of the whole response, and the occurrence says which."""
    response = (
        "return x - 1 is wrong:\n```python\ndef f(x):\n    if x > 0:\n        return x + 1\n    return x - 1\n```\n"
    )
    judgement = judged(response)
    assert quotes(response, judgement["poor"]) == [{"quote": "return x - 1", "occurrence": 2, "severity": 3}]
    assert quotes(response, judgement["good"]) == ["return x + 1"]
    assert judgement["critique"].split("\n") == [
        "The program fails 1 of 2 tests.",
        "test_two fails: assert f(-2) == 3 expects 3 and gets -3.",
        "The fault seems to lie in line 4: return x - 1",
        "Line 3 does what it should: return x + 1",
    ]
    assert judgement["execution"]["tests"] == [
        {"name": "test_one", "passed": True},
        {"name": "test_two", "passed": False, "error": "AssertionError", "expected": "3", "got": "-3"},
    ]


def test_a_traceback_blames_its_innermost_line() -> None:
    response = "def f(x):\n    return g(x)\n\ndef g(x):\n    return [2][x - 1]\n"
    judgement = judged(response)
    assert quotes(response, judgement["poor"]) == [{"quote": "return [2][x - 1]", "severity": 3}]
    assert "test_two raises IndexError: list index out of range in line 5: return [2][x - 1]" in judgement["critique"]
    assert judgement["execution"]["tests"][1]["line"] == 5


def test_dense_labels_every_executed_line() -> None:
    response = "def f(x):\n    y = 3\n    if x > 0:\n        return x + 1\n    y = x\n    return y\n"
    response += "\ndef unused():\n    pass\n"
    code_feedback = feedback(response, judged(response, labels="dense"))
    assert {text for _, text in quoted(response, code_feedback, -1)} == {"y = 3", "if x > 0:", "y = x", "return y"}
    assert [text for _, text in quoted(response, code_feedback, 1)] == ["return x + 1"]


def test_without_a_critique() -> None:
    response = "def f(x):\n    return 2\n"
    judgement = judged(response, critique=False)
    assert judgement["critique"] == ""
    assert quotes(response, judgement["poor"]) == [{"quote": "return 2", "severity": 3}]


@pytest.mark.parametrize(
    ("code", "reason", "expected_text", "poor"),
    [
        ("def f(x):\n    return (\n", "syntax", "does not compile", "return ("),
        ("def f(x):\n    while True:\n        x = 1\n", "timeout", "does not end within 0.5 seconds", None),
        ("import os\ndef f(x):\n    os._exit(0)\n", "exited", "ends its process", "os._exit(0)"),
        ("def g(x):\n    return 2\n", "failed", "cannot import name 'f'", "def g(x):"),
        ("def f(x):\n    while 1: print(x)\n", "too_much_output", "prints more than 64 KiB", "while 1: print(x)"),
        ("import ctypes\ndef f(x):\n    ctypes.string_at(0)\n", "killed", "is killed", "ctypes.string_at(0)"),
    ],
)
def test_programs_that_do_not_come_to_an_end(code: str, reason: str, expected_text: str, poor: str | None) -> None:
    """No way to fail is without a poor span: else leaving would be worth more than being wrong."""
    timeout_s = 0.5 if reason == "timeout" else LIMITS.timeout_s
    judgement = judged(code, limits=LIMITS.model_copy(update={"timeout_s": timeout_s}))
    assert judgement["execution"]["reason"] == reason
    assert expected_text in judgement["critique"]
    blamed = [code[span.start : span.end] for span in judgement["poor"]]
    assert blamed if poor is None else poor in blamed


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [({}, "tests are None"), ({"test": 3}, "tests are 3"), ({"test": "def test(:"}, "tests do not compile")],
)
def test_tests_that_cannot_judge(payload: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_feedback_function(LIMITS, StyleConfig())("question", "x = 1\n", payload=payload)


RULES = """from solution import f

def test_red():
    assert f("red", 5) == 7

def test_blue():
    assert f("blue", 5) == 15

def test_other():
    assert f("green", 5) == 5
"""


def test_a_missing_case_blames_no_neighbour() -> None:
    """The default line is right for other inputs: an omission is in the critique and has no span."""
    response = 'def f(word, x):\n    if word == "red":\n        return x + 2\n    return x\n'
    judgement = judged(response, RULES)
    assert judgement["poor"] == []
    assert quotes(response, judgement["good"]) == ["return x + 2"]
    assert "test_blue fails" in judgement["critique"] and "missing before line 4" in judgement["critique"]
    dense = feedback(response, judged(response, RULES, labels="dense"))
    assert {text for _, text in quoted(response, dense, 1)} == {"return x + 2", "return x"}


def test_beside_a_missing_case_a_wrong_line_is_blamed() -> None:
    response = 'def f(word, x):\n    if word == "red":\n        return x - 2\n    else:\n        return x\n'
    tests = (
        RULES + '\ndef test_pink():\n    assert f("pink", 1) == 1\n\ndef test_nought():\n    assert f("red", 1) == -1\n'
    )
    assert quotes(response, judged(response, tests)["poor"]) == [{"quote": "return x - 2", "severity": 3}]


def test_a_wrong_line_after_a_condition_that_gave_no_value_is_blamed() -> None:
    """Every test ends there: that some pass does not make it right."""
    tests = result(True, "134", returned=4), result(False, "1234", returned=4), result(False, "134", returned=4)
    assert find_omissions(outcome(*tests), {4}) == []
    other = result(True, "12", returned=2)
    assert find_omissions(outcome(*tests, other), {4}) == [4]
    assert find_omissions(outcome(*tests, other), {5}) == []
    assert find_blamed_lines(outcome(*tests, other), LINES, [4]) == []


def test_default_lines_by_hand() -> None:
    code = "def f():\n  y = 1\n  if x:\n    return 1\n\n  elif y: return 2\n  else:\n    y = 2\n    y = 3\n  return 4\n"
    assert find_default_lines(code) == {7, 8, 9, 10}
    assert find_default_lines("match x:\n  case 1:\n    y\n  case _:\n    z\nw\n") == {4, 5}


# -- lines of an outcome, by hand


def outcome(*tests: TestResult) -> Outcome:
    reason = "passed" if all(test.passed for test in tests) else "failed"
    return Outcome(
        passed=reason == "passed", reason=reason, tests=tests, isolation=("rlimits",), output="", seconds=0.1
    )


def result(passed: bool, lines: str, returned: int = 0, trace: tuple[int, ...] = ()) -> TestResult:
    return TestResult(name="t", passed=passed, lines=tuple(map(int, lines)), returned=returned, trace=trace)


LINES = find_code_lines("".join(f"line{n}\n" for n in range(1, 9)), 0)


def test_ochiai_by_hand() -> None:
    assert ochiai(2, 0, 2) == 1
    assert ochiai(1, 3, 1) == 0.5
    assert ochiai(1, 1, 2) == 0.5
    assert ochiai(0, 5, 2) == 0


def test_the_most_suspicious_lines_are_blamed() -> None:
    assert find_blamed_lines(outcome(result(False, "1235"), result(True, "124")), LINES) == [3, 5]
    assert find_blamed_lines(outcome(result(False, "125"), result(False, "135"), result(True, "123")), LINES) == [5]


def test_of_equally_suspicious_lines_the_returning_one_is_blamed() -> None:
    assert find_blamed_lines(outcome(result(False, "1234", returned=3)), LINES) == [3]
    assert find_blamed_lines(outcome(result(False, "1234", returned=7)), LINES) == [4]


def test_a_test_with_a_traceback_has_no_part_in_the_statistics() -> None:
    assert find_blamed_lines(outcome(result(False, "12", trace=(1, 2)), result(False, "3")), LINES) == [2, 3]


def test_lines_that_only_passing_tests_ran_are_praised() -> None:
    tests = outcome(result(True, "1245", returned=5), result(True, "124", returned=4), result(False, "13"))
    assert find_praised_lines(tests, []) == [4, 5, 2]
    assert find_praised_lines(tests, [4]) == [5, 2]


def test_a_long_line_is_shortened_in_each_sentence() -> None:
    line = "x = " + "1 + " * 6000 + "y"
    lines = find_code_lines(f"{line}\n" * 30, 0)
    failed = [result(False, "1", trace=(1,)) for _ in range(4)]
    ended = outcome(*failed, result(True, "2", returned=2))
    critique = format_critique(ended, lines, good=[2], poor=[1, 3], sandbox=LIMITS, omissions=range(4, 30))
    assert f"Line 2 does what it should: {line[:200]}…" in critique.split("\n")
    assert len(critique) < 10_000


def test_code_lines_are_those_of_the_compiler() -> None:
    assert find_code_lines("a\r\n\r\n  b \rc", 10) == {1: (10, "a"), 3: (17, "b"), 4: (20, "c")}


def test_a_machine_that_cannot_isolate_what_is_required_has_no_feedback_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_feedback, "find_refusal", lambda require: f"no {' and '.join(require)}")
    with pytest.raises(UserError, match="no files and network"):
        make_feedback_function(LIMITS.model_copy(update={"require": ("files", "network")}), StyleConfig())


UNMEASURED = (
    "class U:\n    def __sub__(self, other): return self\n    def __abs__(self): return 0\ndef f(x): return U()\n"
)
UNMEASURED_TESTS = "from solution import f\ndef test_near():\n    assert abs(f(2) - 4.5) < 1e-6\n"


def test_what_the_sandbox_cannot_measure_is_no_verdict() -> None:
    sandbox = SandboxConfig(tests="separate")
    function = make_feedback_function(sandbox, StyleConfig())
    with pytest.raises(ValueError, match="cannot measure this program: in test_near"):
        function("", UNMEASURED, payload={"test": UNMEASURED_TESTS})
    prompt = Prompt(prompt_id="1", task="code", prompt_text="", payload={"test": UNMEASURED_TESTS})
    with pytest.raises(ValueError, match="cannot measure"):
        CodeRepair(CodeTask(), sandbox).reply(prompt, [{"role": "assistant", "content": UNMEASURED}])
    assert CodeTask().measure(prompt, UNMEASURED, sandbox=sandbox) == {"passed": 0.0, "unsupported": 1.0}
    outcome = run_solution(UNMEASURED, UNMEASURED_TESTS, sandbox)
    assert (outcome.reason, outcome.passed, outcome.tests[0].unsupported) == ("unsupported", False, True)


def test_one_test_that_fails_decides_whatever_else_is_unsupported() -> None:
    tests = UNMEASURED_TESTS + "def test_equal():\n    assert f(2) == 4.5\n"
    outcome = run_solution(UNMEASURED, tests, SandboxConfig(tests="separate"))
    assert (outcome.reason, [test.unsupported for test in outcome.tests]) == ("failed", [True, False])
