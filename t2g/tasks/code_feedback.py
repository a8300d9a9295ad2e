"""The feedback function of the code task: run the tests, describe the results, and point at lines.

A failing test blames the innermost line of its traceback. A test that fails without one blames by spectrum-based fault
localisation: the lines that ran most in failing and least in passing tests (Ochiai; Abreu et al. 2007, "On the accuracy
of spectrum-based fault localization", section 3). A case that is missing has no line: where failing tests got their
value from a line that is right for others, because no condition before it held, the critique says so and nothing is
blamed.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from t2g.config import StyleConfig
from t2g.errors import MissingLocally
from t2g.sandbox import Outcome, SandboxConfig, TestResult, available, run_solution
from t2g.tasks.base import FeedbackFunction
from t2g.tasks.code import extract_code
from t2g.tasks.references import with_mode
from t2g.types import Span

RunTests = Callable[[str, str, SandboxConfig], Outcome]
WRONG = 3  # severity of a line that is at fault
MAX_TIED = 2  # lines that are equally suspicious and are all blamed; of more, the one that returned
MAX_GOOD = 8  # good quotes in the sparse style; of fewer than its cases, a program is paid nothing for one case more
MAX_DESCRIBED = 3  # failing tests that the critique tells of
MAX_LISTED = 20  # tests in the execution
MAX_QUOTED = 60  # good or poor lines in the dense style
_LINE_END = re.compile(r"\r\n|\r|\n")
_CONDITION = re.compile(r"(if|elif)\b|case\b(?!\s+_\s*:)")
_OTHERWISE = re.compile(r"else\s*:|case\s+_\s*:")
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
        run: As `run_solution`. The function raises what it raises.

    Raises:
        MissingLocally: This machine cannot isolate what `sandbox.require` names.
        ValueError: By the function: there are no tests, or they do not compile.
    """
    if lacking := available(sandbox.require):
        raise MissingLocally(lacking)

    def feedback_function(prompt_text: str, response_text: str, *, payload: Mapping[str, Any]) -> dict[str, Any]:
        tests = payload.get("test")
        if not isinstance(tests, str) or not tests.strip():
            raise ValueError(f"the record's tests are {tests!r:.80}; field test needs a text")
        code, start = extract_code(response_text)
        outcome = run(code, tests, with_mode(sandbox, payload))
        if outcome.reason == "bad_tests":
            raise ValueError("the record's tests do not compile, or hold no test")
        return judge(outcome, code, start, style, sandbox)

    return feedback_function


def judge(outcome: Outcome, code: str, start: int, style: StyleConfig, sandbox: SandboxConfig) -> dict[str, Any]:
    """The judgement of an outcome. start: where the code begins in the response."""
    lines = code_lines(code, start)
    fallen = omissions(outcome, default_lines(code))
    poor = blamed_lines(outcome, lines, fallen)
    good = praised_lines(outcome, poor)
    if style.labels == "sparse":
        returned = {test.returned for test in outcome.tests if test.passed}
        good = [line for line in good if line in returned][:MAX_GOOD] or good[:1]
    else:
        good += fallen
        executed = {line for test in outcome.tests for line in test.lines}
        poor = sorted({*poor, *(line for line in executed if line not in good)})
    good, poor = ([line for line in side if line in lines][:MAX_QUOTED] for side in (good, poor))
    return {
        "critique": describe(outcome, lines, good, poor, sandbox, fallen) if style.critique else "",
        "good": [_span(*lines[line], label=1, severity=1) for line in good],
        "poor": [_span(*lines[line], label=-1, severity=WRONG) for line in poor],
        "execution": {
            "passed": outcome.passed,
            "reason": outcome.reason,
            "tests": [_listed(test) for test in outcome.tests[:MAX_LISTED]],
            "isolation": list(outcome.isolation),
            "mode": outcome.mode,
        },
    }


def code_lines(code: str, start: int) -> dict[int, tuple[int, str]]:
    """Line number, from 1 -> (where its text begins in the response, its text without indentation); no blank lines."""
    begins = [0, *(match.end() for match in _LINE_END.finditer(code))]
    found = {}
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], len(code)], strict=True), start=1):
        text = code[begin:end]
        if text.strip():
            found[number] = (start + begin + len(text) - len(text.lstrip()), text.strip())
    return found


def default_lines(code: str) -> set[int]:
    """Lines, from 1, that run where no condition of their block held: after its `if`, or under `else` or `case _`.

    By indentation: what a model wrote may be too much for a parser.
    """
    found: set[int] = set()
    for_the_rest: dict[int, bool] = {}  # by the indentation of the open blocks: a condition came before in it
    otherwise = False  # the line before opened a block for the rest
    for number, line in enumerate(_LINE_END.split(code), start=1):
        if text := line.strip():
            indent, is_condition = len(line) - len(line.lstrip()), bool(_CONDITION.match(text))
            for_the_rest = {depth: rest for depth, rest in for_the_rest.items() if depth <= indent}
            rest = for_the_rest.get(indent, otherwise)
            found |= {number} if rest and not is_condition else set()
            for_the_rest[indent], otherwise = rest or is_condition, bool(_OTHERWISE.match(text))
    return found


def omissions(outcome: Outcome, defaults: Iterable[int]) -> list[int]:
    """Default lines that gave failing tests their value, and passing tests too, while others passed on another line."""
    ends = {test.returned for test in outcome.tests if test.passed and test.returned}
    fell = {test.returned for test in outcome.tests if not test.passed and not test.skipped and not test.trace}
    return sorted(fell & ends & set(defaults)) if len(ends) > 1 else []


def blamed_lines(outcome: Outcome, lines: Mapping[int, Any], fallen: Iterable[int] = ()) -> list[int]:
    """Lines at fault, in order; at least one for a program that did not pass, wherever it has a line at all.

    fallen: its `omissions`; tests that ended there blame nothing, and where all did nothing is blamed.
    """
    if outcome.passed:
        return []
    ended = [test for test in outcome.tests if not test.passed and not test.skipped]
    failed = [test for test in ended if test.trace or test.returned not in fallen]
    if ended and not failed:
        return []
    blamed = {test.trace[-1] for test in failed if test.trace and test.trace[-1] in lines}
    untraced = [test for test in failed if not test.trace and test.lines]
    if untraced:
        blamed |= _most_suspicious(untraced, [test for test in outcome.tests if test.passed])
    if not blamed and lines:
        hint = _DRASTIC.get(outcome.reason)
        blamed = {line for line, (_, text) in lines.items() if hint and hint.search(text)} or {min(lines)}
    return sorted(blamed)


def _most_suspicious(failed: list[TestResult], passed: list[TestResult]) -> set[int]:
    """Lines of the highest Ochiai score; of more than MAX_TIED, those from which failing tests got their value."""
    in_failed, in_passed = (Counter(line for test in tests for line in test.lines) for tests in (failed, passed))
    scores = {line: ochiai(count, in_passed[line], len(failed)) for line, count in in_failed.items()}
    best = max(scores.values())
    tied = {line for line, score in scores.items() if score > best - 1e-9}
    if len(tied) <= MAX_TIED:
        return tied
    return {test.returned for test in failed if test.returned in tied} or {max(tied)}


def ochiai(num_failed: int, num_passed: int, all_failed: int) -> float:
    """Suspicion of a line that ran in so many failed and passed tests: ef / sqrt(F (ef + ep)), 0 .. 1."""
    return num_failed / math.sqrt(all_failed * (num_failed + num_passed)) if num_failed else 0.0


def praised_lines(outcome: Outcome, blamed: Iterable[int]) -> list[int]:
    """Lines that passing tests ran and failing ones did not; those that gave a passing test its value come first."""
    passed = [test for test in outcome.tests if test.passed]
    failed_lines = {line for test in outcome.tests if not test.passed for line in test.lines}
    counts = Counter(line for test in passed for line in test.lines)
    returned = {test.returned for test in passed}
    kept = [line for line in counts if line not in failed_lines and line not in set(blamed)]
    return sorted(kept, key=lambda line: (line not in returned, -counts[line], line))


def describe(
    outcome: Outcome,
    lines: Mapping[int, tuple[int, str]],
    good: list[int],
    poor: list[int],
    sandbox: SandboxConfig,
    fallen: Iterable[int] = (),
) -> str:
    """The critique: what became of the tests, then the lines that it praises and blames. One sentence a line."""
    failed = [test for test in outcome.tests if not test.passed and not test.skipped]
    num_run = len([test for test in outcome.tests if not test.skipped])
    said = [_headline(outcome, num_run, len(failed), sandbox)]
    said += [_told(test, lines) for test in failed[:MAX_DESCRIBED] if outcome.reason != "syntax"]
    if len(failed) > MAX_DESCRIBED:
        said.append(f"{len(failed) - MAX_DESCRIBED} more tests fail.")
    told = {test.trace[-1] for test in failed[:MAX_DESCRIBED] if test.trace}
    blamed = [line for line in poor if line not in told][:MAX_DESCRIBED]
    said += [f"The fault seems to lie in line {line}: {lines[line][1]}" for line in blamed]
    said += [
        f"A case is missing before line {line}, where such inputs end with others: {lines[line][1]}" for line in fallen
    ]
    said += [f"Line {line} does what it should: {lines[line][1]}" for line in good[:MAX_GOOD]]
    return "\n".join(said)


def _headline(outcome: Outcome, num_run: int, num_failed: int, sandbox: SandboxConfig) -> str:
    one = num_run == 1
    sentences = {
        "passed": f"The program passes {'its test' if one else f'all {num_run} tests'}.",
        "syntax": "The program does not compile.",
        "timeout": f"The program does not end within {sandbox.timeout_s:g} seconds.",
        "exited": "The program ends its process in the middle of the tests.",
        "no_result": "The program ends its process in the middle of the tests.",
        "killed": "The program's process is killed in the middle of the tests.",
        "too_much_output": f"The program prints more than {sandbox.max_output_kib} KiB.",
        "left_processes": "The program passes its tests, but leaves processes of its own behind.",
    }
    failed = f"The program fails {'its test' if one else f'{num_failed} of {num_run} tests'}."
    return sentences.get(outcome.reason, failed)


def _told(test: TestResult, lines: Mapping[int, tuple[int, str]]) -> str:
    """One failing test in a sentence."""
    told = test.name
    if test.trace and test.trace[-1] in lines:
        line = test.trace[-1]
        what = "is still running" if test.error == "OutOfTime" else f"raises {_error(test)}"
        return f"{told} {what} in line {line}: {lines[line][1]}"
    if test.expected or test.got:
        return f"{told} fails: {test.statement} expects {test.expected or '?'} and gets {test.got or '?'}."
    where = f" at {test.statement}" if test.statement else ""
    return f"{told} fails{where} with {_error(test)}."


def _error(test: TestResult) -> str:
    return f"{test.error}: {test.message}" if test.message else test.error


def _span(start: int, text: str, *, label: Literal[-1, 1], severity: int) -> Span:
    return Span(start=start, end=start + len(text), label=label, severity=severity)


def _listed(test: TestResult) -> dict[str, Any]:
    """What the record keeps of a test: plain JSON."""
    kept = {"error": test.error, "message": test.message, "expected": test.expected, "got": test.got}
    line = {"line": test.trace[-1]} if test.trace else {}
    skipped = {"skipped": True} if test.skipped else {}
    return {"name": test.name, "passed": test.passed} | skipped | {k: v for k, v in kept.items() if v} | line
