"""The feedback function of the code task: run the tests, describe the results, and point at lines.

A failing test blames the innermost line of its traceback. Without a traceback, spectrum-based fault localisation blames
the lines that ran most in failing and least in passing tests (Ochiai; Abreu et al. 2007, "On the accuracy of
spectrum-based fault localization", section 3). A missing case has no line: failing tests got their value from a default
line that is right for other tests. The critique then reports the missing case, and no line is blamed.
"""

import ast
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Any, Literal

from t2g.config import StyleConfig
from t2g.errors import MissingLocally
from t2g.sandbox import Outcome, SandboxConfig, TestResult, find_refusal, run_solution
from t2g.tasks.base import FeedbackFunction
from t2g.tasks.code import extract_code
from t2g.tasks.problem_imports import RunTests, run_with_imports
from t2g.types import Span

WRONG = 3  # severity of a line that is at fault
MAX_TIED = 2  # equally suspicious lines that are all blamed; of more lines only those that returned are
MAX_GOOD = 8  # good quotes in the sparse style; with a lower bound a program would gain nothing by one case more
MAX_DESCRIBED = 3  # failing tests in the critique
MAX_LISTED = 20  # tests in the execution
MAX_LINE_CHARS = 200  # characters of a line in a sentence; with long lines the critique would be too long to be used
MAX_QUOTED = 60  # good or poor lines in the dense style
_LINE_END = re.compile(r"\r\n|\r|\n")
_CONDITION = re.compile(r"(if|elif)\b|case\b(?!\s+_\s*:)")
_OTHERWISE = re.compile(r"else\s*:|case\s+_\s*:")
# A constant whose repr a test's result holds unchanged: without blanks and escapes.
_RETURNED = re.compile(r"""return\s+(-?(?:0|[1-9]\d{0,30})(?:\.\d+)?|True|False|None|'[^'\s\\]*'|"[^"\s\\]*")""")
_DRASTIC = {
    "exited": re.compile(r"\b(_exit|exit|quit|abort|kill)\b"),
    "killed": re.compile(r"\b(kill|abort|ctypes|string_at)\b"),
    "left_processes": re.compile(r"\b(fork|Popen|Process|spawn\w*|system)\b"),
}


def make_feedback_function(
    sandbox: SandboxConfig, style: StyleConfig, run: RunTests = run_solution
) -> FeedbackFunction:
    """Return the function (prompt_text, response_text, *, payload) -> {"critique", "good", "poor", "execution"}.

    Good and poor pieces are spans. payload["test"] holds the tests. The function is safe to call from several threads.

    Args:
        run: Replacement of `run_solution`. The function raises what `run` raises.

    Raises:
        MissingLocally: This machine cannot isolate what `sandbox.require` names.
        ValueError: Raised by the function: there are no tests, they do not compile, or the sandbox cannot measure the
            program with them.
    """
    refusal = find_refusal(sandbox.require)
    if refusal:
        raise MissingLocally(refusal)

    def feedback_function(prompt_text: str, response_text: str, *, payload: Mapping[str, Any]) -> dict[str, Any]:
        tests = payload.get("test")
        if not isinstance(tests, str) or not tests.strip():
            raise ValueError(f"the record's tests are {tests!r:.80}; field test needs a text")
        code, start = extract_code(response_text)
        program = textwrap.dedent(code)  # a fence in a list is indented; the numbers of the lines stay
        outcome = run_with_imports(run, program, tests, payload, sandbox)
        if outcome.reason == "bad_tests":
            raise ValueError("the record's tests do not compile, or hold no test")
        if outcome.reason == "unsupported":
            raise ValueError(describe_unsupported(outcome))
        return judge_outcome(outcome, code, start, style, sandbox)

    return feedback_function


def describe_unsupported(outcome: Outcome) -> str:
    """Return why no test of an outcome of reason `unsupported` says whether the program is right."""
    test = next(test for test in outcome.tests if test.unsupported)
    return (
        f"the sandbox cannot measure this program: in {test.name} {test.message}; sandbox.tests=auto with a reference "
        "solution, or sandbox.tests=together, can"
    )


def judge_outcome(
    outcome: Outcome, code: str, start: int, style: StyleConfig, sandbox: SandboxConfig
) -> dict[str, Any]:
    """Return critique, good and poor spans, and execution. start: offset of the code in the response."""
    lines = find_code_lines(code, start)
    omissions = find_omissions(outcome, find_default_lines(code))
    poor = find_blamed_lines(outcome, lines, omissions)
    good = find_praised_lines(outcome, poor)
    if style.labels == "sparse":
        returned = {test.returned for test in outcome.tests if test.passed}
        good_returned = [line for line in good if line in returned]
        good = good_returned[:MAX_GOOD] or good[:1]
    else:
        good += omissions
        executed = set[int]().union(*(test.lines for test in outcome.tests))
        poor = sorted(executed.difference(good).union(poor))
    good = [line for line in good if line in lines][:MAX_QUOTED]
    poor = [line for line in poor if line in lines][:MAX_QUOTED]

    critique = ""
    if style.critique:
        critique = format_critique(outcome, lines, good, poor, sandbox, omissions)
    good_spans = [_span(*lines[line], label=1, severity=1) for line in good]
    poor_spans = []
    for line in poor:
        line_start, text = lines[line]
        fix = find_correction(outcome, line, text)
        poor_spans.append(_span(line_start, text, label=-1, severity=WRONG, fix=fix))
    execution = {
        "passed": outcome.passed,
        "reason": outcome.reason,
        "tests": [_summarize_test(test) for test in outcome.tests[:MAX_LISTED]],
        "isolation": list(outcome.isolation),
        "mode": outcome.mode,
    }
    return {"critique": critique, "good": good_spans, "poor": poor_spans, "execution": execution}


def find_code_lines(code: str, start: int) -> dict[int, tuple[int, str]]:
    """Return line number, from 1 -> (start of its text in the response, stripped text), without blank lines."""
    begins = [0, *(match.end() for match in _LINE_END.finditer(code))]
    ends = [*begins[1:], len(code)]
    lines = {}
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True), start=1):
        line = code[begin:end]
        text = line.strip()
        if text:
            indent = len(line) - len(line.lstrip())
            lines[number] = (start + begin + indent, text)
    return lines


def find_default_lines(code: str) -> set[int]:
    """Return the lines, from 1, that run if no condition of their block holds: after its `if`, under `else`, `case _`.

    Blocks are found by indentation: a model's code may exceed what a parser can take.
    """
    lines: set[int] = set()
    is_default: dict[int, bool] = {}  # indentation of an open block -> whether a condition precedes in it
    is_after_else = False  # the previous line is `else` or `case _`
    for number, line in enumerate(_LINE_END.split(code), start=1):
        text = line.strip()
        if not text:
            continue
        indent = len(line) - len(line.lstrip())
        is_condition = bool(_CONDITION.match(text))
        is_default = {depth: value for depth, value in is_default.items() if depth <= indent}
        is_reached = is_default.get(indent, is_after_else)
        if is_reached and not is_condition:
            lines.add(number)
        is_default[indent] = is_reached or is_condition
        is_after_else = bool(_OTHERWISE.match(text))
    return lines


def find_omissions(outcome: Outcome, defaults: Iterable[int]) -> list[int]:
    """Return default lines that returned in failing and in passing tests, if other tests passed on another line."""
    ends = {test.returned for test in outcome.tests if test.passed and test.returned}
    if len(ends) < 2:
        return []
    failed = [test for test in outcome.tests if not test.passed and not test.skipped]
    failed_ends = {test.returned for test in failed if not test.trace}
    return sorted(failed_ends & ends & set(defaults))


def find_blamed_lines(outcome: Outcome, lines: Mapping[int, Any], omissions: Iterable[int] = ()) -> list[int]:
    """Return the lines at fault, in order: at least one if the program failed, has a line and lacks no case.

    Args:
        omissions: Result of `find_omissions`. Tests that returned there blame no line.
    """
    if outcome.passed:
        return []
    ended = [test for test in outcome.tests if not (test.passed or test.skipped or test.unsupported)]
    failed = [test for test in ended if test.trace or test.returned not in omissions]
    if ended and not failed:
        return []
    raised = {test.trace[-1] for test in failed if test.trace}
    blamed = {line for line in raised if line in lines}
    untraced = [test for test in failed if not test.trace and test.lines]
    if untraced:
        passed = [test for test in outcome.tests if test.passed]
        blamed |= _most_suspicious(untraced, passed)
    if blamed or not lines:
        return sorted(blamed)
    drastic = _DRASTIC.get(outcome.reason)
    if drastic is None:
        return [min(lines)]
    ending = [line for line, (_, text) in lines.items() if drastic.search(text)]
    return sorted(ending) or [min(lines)]


def find_correction(outcome: Outcome, line: int, text: str) -> str | None:
    """Return `return 24` for a line `return 42` if all tests that returned there expect 24, else None."""
    value = _RETURNED.fullmatch(text)
    ended = [test for test in outcome.tests if test.returned == line and not test.skipped]
    expected = {test.expected for test in ended}
    if value is None or len(expected) != 1:
        return None
    actual = repr(ast.literal_eval(value[1]))
    if any(test.got != actual for test in ended):
        return None
    fix = f"return {expected.pop()}"
    if not _RETURNED.fullmatch(fix):
        return None
    return fix


def _most_suspicious(failed: list[TestResult], passed: list[TestResult]) -> set[int]:
    """Return the lines of the highest Ochiai score; of more than MAX_TIED those that returned in failing tests."""
    in_failed = _count_lines(failed)
    in_passed = _count_lines(passed)
    scores: dict[int, float] = {}
    for line, count in in_failed.items():
        scores[line] = ochiai(count, in_passed[line], len(failed))
    best = max(scores.values())
    tied = {line for line, score in scores.items() if score > best - 1e-9}
    if len(tied) <= MAX_TIED:
        return tied
    returned = {test.returned for test in failed if test.returned in tied}
    return returned or {max(tied)}


def _count_lines(tests: Iterable[TestResult]) -> Counter[int]:
    """Return in how many of the tests each line ran."""
    return Counter(chain.from_iterable(test.lines for test in tests))


def ochiai(num_failed: int, num_passed: int, all_failed: int) -> float:
    """Return the suspicion, 0 .. 1, of a line that ran in ef failed and ep passed of F failed tests.

    ef / sqrt(F (ef + ep))
    """
    if not num_failed:
        return 0.0
    return num_failed / math.sqrt(all_failed * (num_failed + num_passed))


def find_praised_lines(outcome: Outcome, blamed: Iterable[int]) -> list[int]:
    """Return lines that ran in passing tests only; lines that returned in a passing test come first."""
    passed = [test for test in outcome.tests if test.passed]
    excluded = set(blamed)
    for test in outcome.tests:
        if not test.passed:
            excluded.update(test.lines)
    counts = _count_lines(passed)
    returned = {test.returned for test in passed}
    praised = [line for line in counts if line not in excluded]
    return sorted(praised, key=lambda line: (line not in returned, -counts[line], line))


def format_critique(
    outcome: Outcome,
    lines: Mapping[int, tuple[int, str]],
    good: list[int],
    poor: list[int],
    sandbox: SandboxConfig,
    omissions: Iterable[int] = (),
) -> str:
    """Return the critique: the results of the tests, then blamed and praised lines. One sentence a line."""
    failed = [test for test in outcome.tests if not test.passed and not test.skipped]
    num_run = sum(not test.skipped for test in outcome.tests)
    described = failed[:MAX_DESCRIBED]
    sentences = [_format_headline(outcome, num_run, len(failed), sandbox)]
    if outcome.reason != "syntax":
        sentences += [_format_failure(test, lines) for test in described]
    if len(failed) > MAX_DESCRIBED:
        sentences.append(f"{len(failed) - MAX_DESCRIBED} more tests fail.")
    traced = {test.trace[-1] for test in described if test.trace}
    untraced = [line for line in poor if line not in traced][:MAX_DESCRIBED]
    texts = {line: _shorten(text) for line, (_, text) in lines.items()}
    sentences += [f"The fault seems to lie in line {line}: {texts[line]}" for line in untraced]
    for line in islice(omissions, MAX_LISTED):
        sentences.append(f"A case is missing before line {line}, where such inputs end with others: {texts[line]}")
    sentences += [f"Line {line} does what it should: {texts[line]}" for line in good[:MAX_GOOD]]
    return "\n".join(sentences)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]}…"


def _format_headline(outcome: Outcome, num_run: int, num_failed: int, sandbox: SandboxConfig) -> str:
    passed_tests = f"all {num_run} tests"
    failed_tests = f"{num_failed} of {num_run} tests"
    if num_run == 1:
        passed_tests = failed_tests = "its test"
    sentences = {
        "passed": f"The program passes {passed_tests}.",
        "syntax": "The program does not compile.",
        "timeout": f"The program does not end within {sandbox.timeout_s:g} seconds.",
        "exited": "The program ends its process in the middle of the tests.",
        "no_result": "The program ends its process in the middle of the tests.",
        "killed": "The program's process is killed in the middle of the tests.",
        "too_much_output": f"The program prints more than {sandbox.max_output_kib} KiB.",
        "left_processes": "The program passes its tests, but leaves processes of its own behind.",
    }
    return sentences.get(outcome.reason, f"The program fails {failed_tests}.")


def _format_failure(test: TestResult, lines: Mapping[int, tuple[int, str]]) -> str:
    """Return one failing test as a sentence."""
    error = test.error
    if test.message:
        error += f": {test.message}"
    if test.trace and test.trace[-1] in lines:
        line = test.trace[-1]
        event = f"raises {error}"
        if test.error == "OutOfTime":
            event = "is still running"
        return f"{test.name} {event} in line {line}: {_shorten(lines[line][1])}"
    if test.expected or test.got:
        expected = test.expected or "?"
        actual = test.got or "?"
        return f"{test.name} fails: {test.statement} expects {expected} and gets {actual}."
    position = ""
    if test.statement:
        position = f" at {test.statement}"
    return f"{test.name} fails{position} with {error}."


def _span(start: int, text: str, *, label: Literal[-1, 1], severity: int, fix: str | None = None) -> Span:
    return Span(start=start, end=start + len(text), label=label, severity=severity, fix=fix)


def _summarize_test(test: TestResult) -> dict[str, Any]:
    """Return what the record holds of a test, as plain JSON."""
    summary: dict[str, Any] = {"name": test.name, "passed": test.passed}
    if test.skipped:
        summary["skipped"] = True
    details = {"error": test.error, "message": test.message, "expected": test.expected, "got": test.got}
    summary |= {name: value for name, value in details.items() if value}
    if test.trace:
        summary["line"] = test.trace[-1]
    return summary
