"""Faults that follow rules, for the start of `make real-proof`: a policy that learns them is wrong for a reason.

A temperature below 1 repairs faults that are noise, since the policy's likeliest token is then correct. It repairs few
of these.
"""

from __future__ import annotations

import random

FAULT_RATE = 0.9  # share of the positions where a rule applies; high, so that the likeliest answer is faulty
DURATIONS = ("h", "hr", "hour", "hours", "day", "days", "week", "weeks", "min", "s")
INVENTED = " after 500 h"  # at the end of a line that has no duration


def plant_rules(findings: list[str], rng: random.Random) -> list[str]:
    """Return a line on each finding, with faults by four rules.

    - rounded: a number loses its decimals.
    - unit: a number without decimals loses its unit.
    - moved: the last number is replaced by that of the finding before.
    - invented: a line without a duration ends with INVENTED.
    """
    from t2g.tasks.checked_lines import find_facts

    lines = []
    number_before = None
    for finding in findings:
        line = finding
        numbers = [fact for fact in find_facts(finding) if fact.kind == "number"]
        for index, fact in reversed([*enumerate(numbers)]):
            is_last = index == len(numbers) - 1
            if rng.random() >= FAULT_RATE:
                continue
            replacement = number_before if is_last and number_before else _shorten(fact.text)
            line = line[: fact.start] + replacement + line[fact.end :]
        has_duration = any(fact.unit in DURATIONS for fact in numbers)
        if not has_duration and rng.random() < FAULT_RATE:
            line = f"{line.rstrip('.')}{INVENTED}."
        number_before = numbers[-1].text if numbers else None
        lines.append(line)
    return lines


def _shorten(number: str) -> str:
    """Return a number without its decimals, or, if it has none, without its unit."""
    whole, point, rest = number.partition(".")
    if point:
        return whole + rest.lstrip("0123456789")
    return number.rstrip("%°CKabcdefghijklmnopqrstuvwxyzµμVWAL² ³").strip()
