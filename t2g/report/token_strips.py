"""Show the reward, advantage and ratio of each token of a response as a strip of colored cells."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from pydantic import FiniteFloat
from typing_extensions import TypeIs

from t2g.runs.log import SampleRecord
from t2g.text.segments import printable

LEVELS = 4  # color levels for positive values, and as many for negative values
MAX_STRIPS = 6
MAX_TOKENS = 400
LEAST_LOGGED_RATIO = 1e-5  # samples.jsonl has five decimals: a smaller ratio is logged as 0
LEAST_RATIO = 0.05  # nats; smaller log ratios are rounding errors and must not get a strong color
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
        logs = [math.log(max(ratio, LEAST_LOGGED_RATIO)) for ratio in self.token_ratios]
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
        names = []
        for index, level in enumerate(self.levels):
            sign = "p" if level > 0 else "m"
            if level:
                names.append(f"q{index}{sign}{abs(level)}")
        return " ".join(names)


def strips(samples: Sequence[SampleRecord]) -> list[tuple[LoggedSample, list[Cell]]]:
    """Return the strips of the last step with token columns, samples with rewards first.

    All strips share the color scales.
    """
    logged = [sample for sample in samples if _has_columns(sample)]
    last_step = max((sample.step for sample in logged), default=0)
    latest = [sample for sample in logged if sample.step == last_step]
    latest.sort(key=lambda sample: not any(sample.token_rewards))
    latest = latest[:MAX_STRIPS]
    scales = [_largest(latest, column) for column in range(len(NAMES))]
    scales[-1] = max(scales[-1], LEAST_RATIO)
    return [(sample, _cells(sample, scales)) for sample in latest]


def _has_columns(sample: SampleRecord) -> TypeIs[LoggedSample]:
    return isinstance(sample, LoggedSample) and bool(sample.token_ranges) and bool(sample.token_rewards)


def _largest(samples: Sequence[LoggedSample], column: int) -> float:
    """Return the largest absolute value of a column."""
    largest = 0.0
    for sample in samples:
        for value in sample.columns[column]:
            largest = max(largest, abs(value))
    return largest


def _cells(sample: LoggedSample, scales: Sequence[float]) -> list[Cell]:
    text = printable(sample.response)
    is_truncated = sample.finish_reason == "length"
    num_tokens = len(sample.token_ranges)
    columns = [column[:num_tokens] for column in sample.columns]
    rows = zip_longest(sample.token_ranges, *columns, fillvalue=0.0)
    cells = []
    text_end = 0  # end of the text in the cells so far
    for (first, last), *values in islice(rows, MAX_TOKENS):
        title = _title(sample, values)
        if is_truncated and last == len(text):
            title += ", truncated here"
        levels = tuple(map(_level, values, scales))
        token = text[max(first, text_end) : last]
        if not token:
            token = "·" if last > first else "∎"
        cells.append(Cell(text=token, levels=levels, title=title))
        text_end = max(text_end, last)
    return cells


def _title(sample: LoggedSample, values: Sequence[float]) -> str:
    reward, advantage, log_ratio = values
    title = f"reward {reward:+.2f}"
    if sample.token_advantages:
        title += f", advantage {advantage:+.2f}"
    if sample.token_ratios:
        title += f", ratio {math.exp(log_ratio):.3f}"
    return title


def _level(value: float, scale: float) -> int:
    """Return the color level of a value; `scale` has the strongest one."""
    if not scale:
        return 0
    return round(LEVELS * value / scale)
