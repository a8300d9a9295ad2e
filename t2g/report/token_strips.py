"""Show the reward, advantage and ratio of each token of a response as a strip of coloured cells."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pydantic import FiniteFloat

from t2g.runs.log import SampleRecord
from t2g.text.segments import printable

LEVELS = 4  # colour levels for positive values, and as many for negative values
MAX_STRIPS, MAX_TOKENS = 6, 400
LEAST_RATIO = 0.05  # nats; smaller log ratios are rounding errors and must not get a strong colour
NAMES = ("reward", "advantage", "ratio")


@dataclass(frozen=True, kw_only=True)
class LoggedSample(SampleRecord):
    """A line of samples.jsonl with its token columns, [R] each, or empty for a response that was not trained on."""

    token_ranges: Sequence[tuple[int, int]] = ()
    token_rewards: Sequence[FiniteFloat] = ()
    token_advantages: Sequence[FiniteFloat] = ()
    token_ratios: Sequence[FiniteFloat] = ()

    @property
    def columns(self) -> tuple[Sequence[float], ...]:
        """Return rewards, advantages and log ratios, in the order of NAMES."""
        logs = [math.log(ratio) if ratio > 0 else 0.0 for ratio in self.token_ratios]
        return self.token_rewards, self.token_advantages, logs


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A token in a strip."""

    text: str  # "∎" for a token without characters (EOS); "·" for a further token of one character
    levels: tuple[int, int, int]  # -LEVELS to LEVELS, by NAMES
    title: str

    @property
    def classes(self) -> str:
        """Return CSS classes such as "q0p4 q1m1": index in NAMES, p(lus) or m(inus), level."""
        return " ".join(f"q{i}{'p' if level > 0 else 'm'}{abs(level)}" for i, level in enumerate(self.levels) if level)


def strips(samples: Sequence[SampleRecord]) -> list[tuple[LoggedSample, list[Cell]]]:
    """Return the strips of the last step with token columns, samples with rewards first.

    All strips share the colour scales.
    """
    logged = [s for s in samples if isinstance(s, LoggedSample) and s.token_ranges and s.token_rewards]
    last = max((s.step for s in logged), default=0)
    latest = sorted((s for s in logged if s.step == last), key=lambda s: not any(s.token_rewards))[:MAX_STRIPS]
    scales = [max((abs(v) for s in latest for v in s.columns[i]), default=0.0) for i in range(len(NAMES))]
    scales[-1] = max(scales[-1], LEAST_RATIO)
    return [(sample, _cells(sample, scales)) for sample in latest]


def _cells(sample: LoggedSample, scales: Sequence[float]) -> list[Cell]:
    cells, end, text = [], 0, printable(sample.response)
    columns = (column[: len(sample.token_ranges)] for column in sample.columns)
    for (first, last), *values in list(zip_longest(sample.token_ranges, *columns, fillvalue=0.0))[:MAX_TOKENS]:
        title = f"reward {values[0]:+.2f}"
        title += f", advantage {values[1]:+.2f}" if sample.token_advantages else ""
        title += f", ratio {math.exp(values[2]):.3f}" if sample.token_ratios else ""
        title += ", truncated here" if sample.finish_reason == "length" and last == len(text) else ""
        levels = tuple(round(LEVELS * v / scale) if scale else 0 for v, scale in zip(values, scales, strict=True))
        token = text[max(first, end) : last] or ("·" if last > first else "∎")
        cells.append(Cell(text=token, levels=levels, title=title))
        end = max(end, last)
    return cells
