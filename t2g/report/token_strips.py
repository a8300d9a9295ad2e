"""What each token of a response was paid, as cells of a strip: text, and a level of colour for each quantity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pydantic import FiniteFloat

from t2g.report.segments import printable
from t2g.runs.log import SampleRecord

LEVELS = 4  # of colour on each side of none
MAX_STRIPS, MAX_TOKENS = 6, 400
LEAST_RATIO = 0.05  # nats: what is nearer to 1 is rounding, and has no colour
NAMES = ("reward", "advantage", "ratio")


@dataclass(frozen=True, kw_only=True)
class LoggedSample(SampleRecord):
    """A whole line of samples.jsonl; [R] each, or empty for a response that was not trained on."""

    token_ranges: Sequence[tuple[int, int]] = ()
    token_rewards: Sequence[FiniteFloat] = ()
    token_advantages: Sequence[FiniteFloat] = ()
    token_ratios: Sequence[FiniteFloat] = ()

    @property
    def columns(self) -> tuple[Sequence[float], ...]:
        """In the order of NAMES; of ratios the logarithm."""
        logs = [math.log(ratio) if ratio > 0 else 0.0 for ratio in self.token_ratios]
        return self.token_rewards, self.token_advantages, logs


@dataclass(frozen=True, kw_only=True)
class Cell:
    text: str  # "∎" for a token without characters, which ends the response; "·" for a later part of one character
    levels: tuple[int, int, int]  # -LEVELS to LEVELS, by NAMES
    title: str

    @property
    def classes(self) -> str:
        """q0p4 q1m1: of the page's colours, the place in NAMES, plus or minus, how strong."""
        return " ".join(f"q{i}{'p' if level > 0 else 'm'}{abs(level)}" for i, level in enumerate(self.levels) if level)


def strips(samples: Sequence[SampleRecord]) -> list[tuple[LoggedSample, list[Cell]]]:
    """Of the last step that has some: first those that were paid something. One scale for all of them."""
    known = [one for one in samples if isinstance(one, LoggedSample) and one.token_ranges and one.token_rewards]
    last = max((one.step for one in known), default=0)
    shown = sorted((one for one in known if one.step == last), key=lambda one: not any(one.token_rewards))[:MAX_STRIPS]
    most = [max((abs(v) for one in shown for v in one.columns[i]), default=0.0) for i in range(len(NAMES))]
    most[-1] = max(most[-1], LEAST_RATIO)
    return [(one, _cells(one, most)) for one in shown]


def _cells(sample: LoggedSample, most: Sequence[float]) -> list[Cell]:
    cells, end, text = [], 0, printable(sample.response)
    columns = (column[: len(sample.token_ranges)] for column in sample.columns)
    for (first, last), *known in list(zip_longest(sample.token_ranges, *columns, fillvalue=0.0))[:MAX_TOKENS]:
        words = [f"reward {known[0]:+.2f}"]
        words += [f"advantage {known[1]:+.2f}"] if sample.token_advantages else []
        words += [f"ratio {math.exp(known[2]):.3f}"] if sample.token_ratios else []
        words += ["truncated here"] if sample.finish_reason == "length" and last == len(text) else []
        levels = tuple(round(LEVELS * v / top) if top else 0 for v, top in zip(known, most, strict=True))
        own = text[max(first, end) : last] or ("·" if last > first else "∎")
        cells.append(Cell(text=own, levels=levels, title=", ".join(words)))
        end = max(end, last)
    return cells
