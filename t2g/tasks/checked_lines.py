"""A line on each finding, each fact of which is checked against that finding: names, and numbers with their units.

`finding_lines` checks whether a detail occurs anywhere in the text. Here a number of another finding, a rounded one and
one without its unit are faults too, as are facts that no finding has.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import chain
from typing import Literal, NamedTuple

from t2g.config import StyleConfig
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import FeedbackFunction
from t2g.tasks.findings import FindingsTask
from t2g.tasks.findings_feedback import find_details
from t2g.types import Prompt, Span

FactKind = Literal["number", "name"]
Fault = Literal["rounded", "unit", "moved", "invented"]
FAULTS: tuple[Fault, ...] = ("rounded", "unit", "moved", "invented")
SEVERITY: dict[FactKind, Literal[1, 2, 3]] = {"number": 3, "name": 2}

_LINE = re.compile(r"[^\n]+")
_MARKER = re.compile(r"\s*(?:[-*•]|\d+[.)](?=\s))?\s*")  # the marker of a list
_NUMBER = re.compile(r"\d[\d.,]*(?<![.,])")
_UNIT = re.compile(
    r"\s?(%|(?:mol|wt|vol) ?%|°\s?C|K|nm|[µμ]m|[cm]m[²³23]?|m?V|m?eV|m?W|m?A|mg|m[lL]|ppm|h|hr|hours?|days?"
    r"|weeks?|min|s)(?!\w)"
)
_ROUNDING = Context(prec=100, rounding=ROUND_HALF_UP)


class Fact(NamedTuple):
    """A name, or a number with its unit, at characters [start, end) of a text."""

    kind: FactKind
    value: str  # as compared: without commas, in lower case
    unit: str  # as compared; "" without one, and for a name
    text: str
    start: int
    end: int

    @property
    def identity(self) -> tuple[str, str]:
        """Return what makes two facts equal."""
        return self.value, self.unit


class JudgedFact(NamedTuple):
    """A fact of a line, and what is wrong with it."""

    fact: Fact
    line: int  # from 0: the number of its finding
    fault: Fault | None
    correction: str | None  # the finding's fact, for `rounded` and `unit`


class Line(NamedTuple):
    """A line of a text without its list marker, from character `start` on."""

    text: str
    start: int


class CheckedLinesTask(FindingsTask):
    """Report each finding in a line of its own, which is checked against this finding."""

    name = "checked_lines"
    score_name = "fact_f1"
    instruction = "Report each of the following findings in one line. Keep every name, number and unit.\n\n"

    def make_feedback_function(self, *, style: StyleConfig, sandbox: SandboxConfig) -> FeedbackFunction | None:
        return feedback_function

    def can_measure(self, prompt: Prompt) -> bool:
        return True  # the findings are the reference

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Return `measure_facts`."""
        return measure_facts(prompt.prompt_text, response_text)


def feedback_function(prompt_text: str, response_text: str) -> tuple[str, list[Span], list[Span]]:
    """Return critique, good spans and poor spans.

    A fact is good where its line reports it first. What a line leaves out is in the critique, and has no span.

    >>> feedback_function("Zinc helped 40.5% of 60.", "- Zinc helped 40% of 60.")[0]
    '40%: finding 1 says 40.5%. 60: so says finding 1. Finding 1 also has 40.5%.'
    """
    findings = split_lines(prompt_text)
    critique = ""
    good: list[Span] = []
    poor: list[Span] = []
    reported: set[tuple[int, tuple[str, str]]] = set()
    for judged in judge_facts(prompt_text, response_text):
        fact = judged.fact
        key = (judged.line, fact.identity)
        if judged.fault is None and key in reported:
            continue
        reported.add(key)
        start = len(critique) + bool(critique)
        critique = f"{critique} {_describe(judged)}".strip()
        about = (start, len(critique))
        span = Span(start=fact.start, end=fact.end, label=1, severity=1, critique_range=about)
        if judged.fault is None:
            good.append(span)
            continue
        severity = SEVERITY[fact.kind]
        poor.append(
            Span(
                start=fact.start,
                end=fact.end,
                label=-1,
                severity=severity,
                critique_range=about,
                fix=judged.correction,
            )
        )

    for number, finding in enumerate(findings):
        left_out = [fact.text for fact in find_facts(finding.text) if (number, fact.identity) not in reported]
        if left_out:
            critique += f" Finding {number + 1} also has {', '.join(left_out)}."
    return critique.strip() or "It reports no name and no number.", good, poor


def measure_facts(prompt_text: str, response_text: str) -> dict[str, float]:
    """Return precision, recall and F1 of the facts, line by line, and the share of the facts with each fault.

    Facts are counted once a line. A response without facts has precision 0.

    >>> measure_facts("Zinc helped 40.5% of 60.", "- Zinc helped 40% of 60.")["fact_f1"]
    0.5
    """
    findings = split_lines(prompt_text)
    num_expected = 0
    for finding in findings:
        num_expected += len({fact.identity for fact in find_facts(finding.text)})

    judged_once = {(judged.line, judged.fact.identity): judged for judged in judge_facts(prompt_text, response_text)}
    num_reported = len(judged_once)
    faults = [judged.fault for judged in judged_once.values()]
    num_right = faults.count(None)
    precision = num_right / num_reported if num_reported else 0.0
    recall = num_right / num_expected if num_expected else 1.0
    f1 = 2 * precision * recall / (precision + recall) if num_right else 0.0
    measures = {"fact_precision": precision, "fact_recall": recall, "fact_f1": f1}
    for fault in FAULTS:
        measures[f"fault_{fault}"] = faults.count(fault) / num_reported if num_reported else 0.0
    return measures


def judge_facts(prompt_text: str, response_text: str) -> list[JudgedFact]:
    """Return the facts of a response in order, with their characters in it; line k belongs to finding k."""
    facts_of_findings = [[*find_facts(finding.text)] for finding in split_lines(prompt_text)]
    judged: list[JudgedFact] = []
    for number, line in enumerate(split_lines(response_text)):
        expected = facts_of_findings[number] if number < len(facts_of_findings) else []
        others = [facts for index, facts in enumerate(facts_of_findings) if index != number]
        for fact in find_facts(line.text):
            placed = fact._replace(start=line.start + fact.start, end=line.start + fact.end)
            judged.append(_judge(placed, number, expected, others))
    return judged


def split_lines(text: str) -> list[Line]:
    """Return the lines of a text that are not blank, without their list markers."""
    lines: list[Line] = []
    for match in _LINE.finditer(text):
        marker = _MARKER.match(match.group())
        offset = marker.end() if marker else 0
        content = match.group()[offset:].rstrip()
        if content:
            lines.append(Line(content, match.start() + offset))
    return lines


def find_facts(line: str) -> Iterator[Fact]:
    """Yield the names of a line, and its numbers with the units that follow them.

    >>> [(fact.value, fact.unit) for fact in find_facts("In air PCE is 1,019.24 % after 500 h.")]
    [('pce', ''), ('1019.24', '%'), ('500', 'h')]
    """
    unit_end = 0
    for detail in find_details(f" {line}"):  # which takes a number that begins a text for a list's
        start = detail.start - 1
        if start < unit_end:
            continue  # a unit in capitals is no name, and decimals are no number
        end = detail.end - 1
        number = _NUMBER.match(line, start)
        if number is None:
            text = line[start:end]
            yield Fact("name", text.casefold(), "", text, start, end)
            continue
        unit = _UNIT.match(line, number.end())
        unit_end = unit.end() if unit else number.end()
        value = number.group().replace(",", "")
        unit_text = _normalize_unit(unit.group()) if unit else ""
        yield Fact("number", value, unit_text, line[start:unit_end], start, unit_end)


def _normalize_unit(unit: str) -> str:
    """Return a unit without blanks, with one form of micro, of powers and of the liter."""
    return "".join(unicodedata.normalize("NFKC", unit).split()).replace("L", "l")


def _judge(fact: Fact, line: int, expected: Sequence[Fact], others: Sequence[Sequence[Fact]]) -> JudgedFact:
    if any(fact.identity == other.identity for other in expected):
        return JudgedFact(fact, line, None, None)

    numbers = [other for other in expected if fact.kind == other.kind == "number"]
    for number in numbers:
        if fact.value == number.value:
            return JudgedFact(fact, line, "unit", number.text)
    for number in numbers:
        if _is_rounded(fact.value, number.value):
            return JudgedFact(fact, line, "rounded", number.text)

    values_elsewhere = {other.value for other in chain.from_iterable(others)}
    fault: Fault = "moved" if fact.value in values_elsewhere else "invented"
    return JudgedFact(fact, line, fault, None)


def _is_rounded(value: str, exact: str) -> bool:
    """Return whether a number is another one with fewer decimals, rounded or cut."""
    whole, point, decimals = value.partition(".")
    exact_whole, exact_point, exact_decimals = exact.partition(".")
    if not exact_point or len(decimals) >= len(exact_decimals) or "." in decimals or "." in exact_decimals:
        return False
    if whole == exact_whole and exact_decimals.startswith(decimals):
        return True
    if len(exact) > _ROUNDING.prec:
        return False
    rounded = Decimal(exact).quantize(Decimal(1).scaleb(-len(decimals)), context=_ROUNDING)
    return str(rounded) == f"{whole}{point}{decimals}"


def _describe(judged: JudgedFact) -> str:
    fact = judged.fact
    finding = f"finding {judged.line + 1}"
    match judged.fault:
        case None:
            return f"{fact.text}: so says {finding}."
        case "rounded" | "unit":
            return f"{fact.text}: {finding} says {judged.correction}."
        case "moved":
            return f"{fact.text}: this {fact.kind} is in another finding, not in {finding}."
        case "invented":
            return f"{fact.text}: {finding} has no such {fact.kind}."
