"""Compare two methods, each at its own learning rate, from the file of finished runs that `compare.results` names.

    python -m jobs.compare.paired_rates configs/smol_checked/results.jsonl span=3e-3 scalar=1e-3

`python -m jobs.compare` gives each method the rate that a short search found. This table is for rates that whole runs
have shown to be better. A pair is a seed with a finished run of both methods.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.common.cli import program_name, run_to_exit_code
from t2g.errors import UserError
from t2g.runs.journal import read_journal
from t2g.study.comparison import TARGETING, RunCurve, subtract_matched
from t2g.study.result_lines import ResultLine
from t2g.study.tables import NOTHING, markdown, spread, t_interval


@dataclass(frozen=True)
class MethodAtRate:
    """A method and its learning rate."""

    method: str
    lr: float

    def __str__(self) -> str:
        return f"{self.method} at {self.lr:g}"

    @staticmethod
    def parse(text: str) -> "MethodAtRate":
        """Read METHOD=RATE."""
        method, _, rate = text.partition("=")
        try:
            return MethodAtRate(method, float(rate))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not METHOD=RATE, as in span=3e-3") from None


@dataclass(frozen=True)
class Pair:
    """The runs of the two methods with the same seed."""

    first: RunCurve
    second: RunCurve


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("jobs.compare.paired_rates"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help="file of finished runs")
    parser.add_argument("first", type=MethodAtRate.parse, metavar="METHOD=RATE")
    parser.add_argument(
        "second", type=MethodAtRate.parse, metavar="METHOD=RATE", help="what the first is compared with"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="by default all that have both runs")
    options = parser.parse_args(argv)

    def print_table() -> None:
        if not options.results.is_file():
            raise UserError(f"{options.results} is not a file")
        lines = read_journal(options.results, ResultLine)
        pairs = find_pairs(lines, options.first, options.second)
        if options.seeds is not None:
            pairs = {seed: pair for seed, pair in pairs.items() if seed in options.seeds}
        if not pairs:
            raise UserError(f"{options.results}: no seed has a finished run of {options.first} and {options.second}")
        print(make_table(pairs, str(options.first), str(options.second)))

    return run_to_exit_code(parser.prog, print_table)


def find_pairs(lines: Iterable[ResultLine], first: MethodAtRate, second: MethodAtRate) -> dict[int, Pair]:
    """Return the pairs by seed. Runs of a rate search are left out: they end after fewer samples."""
    known = list(lines)
    num_samples = max((line.run.samples[-1] for line in known), default=0)
    runs: dict[tuple[MethodAtRate, int], RunCurve] = {}
    for line in known:
        if line.run.samples[-1] == num_samples:
            runs[MethodAtRate(line.method, line.lr), line.seed] = line.run
    seeds = sorted({line.seed for line in known})
    return {
        seed: Pair(runs[first, seed], runs[second, seed])
        for seed in seeds
        if (first, seed) in runs and (second, seed) in runs
    }


def make_table(pairs: Mapping[int, Pair], first: str, second: str) -> str:
    """Return the two means, their difference and the differences by seed, as a Markdown table with its legend."""
    some_run = next(iter(pairs.values())).first
    rows: list[list[str]] = []
    for index, samples in enumerate(some_run.samples):
        rows.append(_make_row(f"score after {samples:,} samples", pairs, lambda run, index=index: run.scores[index]))
    rows.append(_make_row("mean of the last three", pairs, lambda run: run.score))
    rows.append(_make_equal_kl_row(pairs))
    rows += [_make_targeting_row(name, pairs) for name in TARGETING]
    seeds = ", ".join(map(str, pairs))
    head = ("", first, second, "first less second", "by seed")
    legend = f"Seeds {seeds}; ± is half the 95 % t interval over them. `python -m jobs.compare` explains the rows."
    return f"{markdown(head, rows)}\n\n{legend}"


def _make_row(name: str, pairs: Mapping[int, Pair], figure: Callable[[RunCurve], float | None]) -> list[str]:
    """Return the row of a figure; dashes where a run lacks it."""
    firsts: list[float] = []
    seconds: list[float] = []
    for pair in pairs.values():
        first = figure(pair.first)
        second = figure(pair.second)
        if first is None or second is None:
            return [name, *[NOTHING] * 4]
        firsts.append(first)
        seconds.append(second)
    differences = [first - second for first, second in zip(firsts, seconds, strict=True)]
    return [name, spread(t_interval(firsts)), spread(t_interval(seconds)), *_format_differences(differences)]


def _make_targeting_row(name: str, pairs: Mapping[int, Pair]) -> list[str]:
    return _make_row(name, pairs, lambda run: (run.targeting or {}).get(name))


def _make_equal_kl_row(pairs: Mapping[int, Pair]) -> list[str]:
    matched = [subtract_matched(pair.first, pair.second, "kls") for pair in pairs.values()]
    differences = [value for value in matched if value is not None]
    is_complete = len(differences) == len(pairs)
    cells = _format_differences(differences) if is_complete else [NOTHING, NOTHING]
    return ["score at equal KL", NOTHING, NOTHING, *cells]


def _format_differences(differences: list[float]) -> list[str]:
    by_seed = ", ".join(f"{difference:.3f}" for difference in differences)
    return [spread(t_interval(differences)), by_seed]


if __name__ == "__main__":
    sys.exit(main())
