"""Compare two methods, each at its own learning rate, from the file of finished runs that `compare.results` names.

    python -m jobs.compare.paired_rates configs/smol_checked/results.jsonl span=3e-3 scalar=1e-3

`python -m jobs.compare` gives each method the rate that a short search found. This table is for rates that whole runs
have shown to be better. A pair is a seed with a finished run of both methods.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.common.cli import program_name, run_to_exit_code
from t2g.errors import UserError
from t2g.runs.journal import read_journal
from t2g.study.comparison import TARGETING, WINDOW, RunCurve, subtract_matched
from t2g.study.result_lines import ResultLine
from t2g.study.tables import NOTHING, markdown, spread, t_interval

LEGEND = """\
Seeds {seeds}; ± is half the 95 % t interval over them. Scores are held-out ones. At equal KL: where each run first has
moved as far as both ever do, linear between evaluations. From criticised to returns: what training changed in held-out
responses of the start, defined in `t2g.study.targeting`. retention: change of log p of `compare.retention`, nats a
token; choices_change: change of the share of right answers to `compare.choices`."""


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

    def select(self, lines: Iterable[ResultLine]) -> list[ResultLine]:
        """Return the lines of this method at this rate."""
        return [line for line in lines if line.method == self.method and line.lr == self.lr]


@dataclass(frozen=True)
class Pair:
    """The runs of the two methods with the same seed."""

    first: ResultLine
    second: ResultLine

    @property
    def has_one_start(self) -> bool:
        """Return whether both runs are known to have begun from the same weights."""
        return self.first.start is not None and self.first.start == self.second.start


Pairs = Mapping[int, Pair]  # by seed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("jobs.compare.paired_rates"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help="file of finished runs")
    parser.add_argument("first", type=MethodAtRate.parse, metavar="METHOD=RATE")
    parser.add_argument("second", type=MethodAtRate.parse, metavar="METHOD=RATE", help="the method to compare with")
    parser.add_argument("--seeds", type=int, nargs="+", help="by default all that have both runs")
    options = parser.parse_args(argv)
    return run_to_exit_code(parser.prog, lambda: print_table(options))


def print_table(options: argparse.Namespace) -> None:
    """Print the table and what qualifies it."""
    if not options.results.is_file():
        raise UserError(f"{options.results} is not a file")
    lines = read_journal(options.results, ResultLine)
    pairs = find_pairs(lines, options.first, options.second)
    seeds = options.seeds or [*pairs]
    missing = [seed for seed in seeds if seed not in pairs]
    if missing or not seeds:
        which = f"seeds {missing} have" if missing else "no seed has"
        raise UserError(f"{options.results}: {which} no pair of finished runs of {options.first} and {options.second}")
    chosen = {seed: pairs[seed] for seed in seeds}
    print(make_table(chosen, str(options.first), str(options.second)))
    print(f"\n{LEGEND.format(seeds=', '.join(map(str, seeds)))}")
    others = [seed for seed, pair in chosen.items() if not pair.has_one_start]
    if others:
        print(f"Seeds {others}: the two runs began from other weights, or their weights were not recorded.")


def find_pairs(lines: Sequence[ResultLine], first: MethodAtRate, second: MethodAtRate) -> dict[int, Pair]:
    """Return the pairs by seed. Runs of a rate search are left out: they end after fewer samples.

    Raises:
        UserError: A method has two runs of one seed, or runs were evaluated after different numbers of samples.
    """
    first_lines = first.select(lines)
    second_lines = second.select(lines)
    num_samples = max((max(line.run.samples, default=0) for line in first_lines + second_lines), default=0)
    first_runs = _select_whole_runs(first_lines, num_samples)
    second_runs = _select_whole_runs(second_lines, num_samples)
    seeds = sorted(first_runs.keys() & second_runs.keys())
    grids = {runs[seed].run.samples for seed in seeds for runs in (first_runs, second_runs)}
    if len(grids) > 1:
        raise UserError(f"{first} and {second} were evaluated after different samples: {sorted(grids)}")
    return {seed: Pair(first_runs[seed], second_runs[seed]) for seed in seeds}


def _select_whole_runs(lines: Iterable[ResultLine], num_samples: int) -> dict[int, ResultLine]:
    """Return the runs that were trained on `num_samples` samples, by seed."""
    by_seed: dict[int, ResultLine] = {}
    for line in lines:
        if max(line.run.samples, default=0) < num_samples:
            continue
        if line.seed in by_seed:
            keys = f"{by_seed[line.seed].key} and {line.key}"
            raise UserError(f"{line.method} at {line.lr:g} has two runs of seed {line.seed}, with the keys {keys}")
        by_seed[line.seed] = line
    return by_seed


def make_table(pairs: Pairs, first_name: str, second_name: str) -> str:
    """Return the means, their differences and the differences by seed, as a Markdown table."""
    samples = next(iter(pairs.values())).first.run.samples
    rows: list[list[str]] = []
    for index, count in enumerate(samples):
        rows.append(_make_row(f"score after {count:,} samples", pairs, lambda run, index=index: run.scores[index]))
    rows.append(_make_row(f"mean of the last {WINDOW}", pairs, lambda run: run.score))
    rows.append(_make_equal_kl_row(pairs))
    rows += [_make_targeting_row(name, pairs) for name in TARGETING]
    return markdown(("", first_name, second_name, "first less second", "by seed"), rows)


def _make_row(name: str, pairs: Pairs, measure: Callable[[RunCurve], float | None]) -> list[str]:
    """Return the row of what `measure` reads from a run; dashes where a run lacks it."""
    first_values: list[float] = []
    second_values: list[float] = []
    for pair in pairs.values():
        first_value = measure(pair.first.run)
        second_value = measure(pair.second.run)
        if first_value is None or second_value is None:
            return [name, *[NOTHING] * 4]
        first_values.append(first_value)
        second_values.append(second_value)
    differences = [first - second for first, second in zip(first_values, second_values, strict=True)]
    means = [spread(t_interval(first_values)), spread(t_interval(second_values))]
    return [name, *means, *_format_differences(differences)]


def _make_targeting_row(name: str, pairs: Pairs) -> list[str]:
    return _make_row(name, pairs, lambda run: (run.targeting or {}).get(name))


def _make_equal_kl_row(pairs: Pairs) -> list[str]:
    at_equal_kl = [subtract_matched(pair.first.run, pair.second.run, "kls") for pair in pairs.values()]
    differences = [value for value in at_equal_kl if value is not None]
    is_complete = len(differences) == len(pairs)
    cells = _format_differences(differences) if is_complete else [NOTHING, NOTHING]
    return ["score at equal KL", NOTHING, NOTHING, *cells]


def _format_differences(differences: list[float]) -> list[str]:
    rounded = [round(difference, 3) + 0.0 for difference in differences]  # + 0.0: else -0.000
    by_seed = ", ".join(f"{difference:.3f}" for difference in rounded)
    return [spread(t_interval(differences)), by_seed]


if __name__ == "__main__":
    sys.exit(main())
