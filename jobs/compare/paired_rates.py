"""Compare two methods, each at its own learning rate, from the file of finished runs that `compare.results` names.

    python -m jobs.compare.paired_rates configs/smol_checked/results.jsonl span=3e-3 scalar=1e-3
    python -m jobs.compare.paired_rates configs/smol_checked/results.jsonl span=3e-3@128 scalar=1e-3    # at equal KL

`python -m jobs.compare` gives each method the rate that a short search found. This table is for rates that whole runs
have shown to be better. A pair is a seed with a finished run of both methods. `@128` selects the runs of 128 samples,
such as short ones with an evaluation after each step; without it, the longest runs are compared.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.common.cli import program_name, run_to_exit_code
from t2g.errors import UserError
from t2g.runs.journal import read_journal
from t2g.study.comparison import WINDOW, RunCurve, subtract_matched
from t2g.study.result_lines import ResultLine
from t2g.study.tables import NOTHING, markdown, spread, t_interval

LEGEND = """\
Seeds {seeds}; ± is half the 95 % t interval over them. Scores are held-out ones; KL is to the start, nats a response,
measured at the next step. At equal KL: where each run first has moved as far as both ever do, linear between
evaluations. Δ log p is in nats a token. That of criticised, praised and unmentioned tokens, and criticism that recurs,
are of held-out responses of the start (`t2g.study.targeting`). Right choices: the share of `compare.choices`."""
LABELS = {  # by key of RunCurve.targeting
    "criticised": "Δ log p of criticised tokens",
    "praised": "Δ log p of praised tokens",
    "unmentioned": "Δ log p of unmentioned tokens",
    "difference": "criticised less unmentioned",
    "matched": "matched difference",
    "returns": "criticism that recurs, share",
    "retention": "Δ log p of compare.retention",
    "choices_change": "right choices, change",
}


@dataclass(frozen=True)
class MethodRuns:
    """The runs of a method at a learning rate that are trained on the same number of samples."""

    method: str
    lr: float
    num_samples: int | None = None  # None: those of the longest run

    def __str__(self) -> str:
        name = f"{self.method} at {self.lr:g}"
        return name if self.num_samples is None else f"{name}, {self.num_samples:,} samples"

    @staticmethod
    def parse(text: str) -> "MethodRuns":
        """Read METHOD=RATE or METHOD=RATE@SAMPLES."""
        name, at, samples = text.partition("@")
        method, _, rate = name.partition("=")
        try:
            return MethodRuns(method, float(rate), int(samples) if at else None)
        except ValueError:
            example = "METHOD=RATE or METHOD=RATE@SAMPLES, as in span=3e-3@128"
            raise argparse.ArgumentTypeError(f"{text!r} is not {example}") from None

    def select_runs(self, lines: Iterable[ResultLine]) -> dict[int, ResultLine]:
        """Return the runs by seed, without those of a rate search, whose held-out prompts are other ones.

        Raises:
            UserError: A seed has two runs.
        """
        reported = [line for line in lines if line.held_out is None]
        at_rate = [line for line in reported if line.method == self.method and line.lr == self.lr]
        num_samples = self.num_samples
        if num_samples is None:
            num_samples = max((line.run.samples[-1] for line in at_rate), default=0)

        by_seed: dict[int, ResultLine] = {}
        for line in at_rate:
            if line.run.samples[-1] != num_samples:
                continue
            if line.seed in by_seed:
                keys = f"{by_seed[line.seed].key} and {line.key}"
                raise UserError(f"{self} has two runs of seed {line.seed}, with the keys {keys}")
            by_seed[line.seed] = line
        return by_seed


@dataclass(frozen=True)
class Pair:
    """The runs of the two methods with the same seed."""

    first: ResultLine
    second: ResultLine

    @property
    def has_same_start(self) -> bool:
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
    metavar = "METHOD=RATE[@SAMPLES]"
    parser.add_argument("first", type=MethodRuns.parse, metavar=metavar)
    parser.add_argument("second", type=MethodRuns.parse, metavar=metavar, help="the method to compare with")
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
    if not pairs:
        available = sorted({f"{line.method}={line.lr:g}" for line in lines})
        raise UserError(
            f"{options.results}: no seed has finished runs of both {options.first} and {options.second}; the file has "
            f"{', '.join(available)}"
        )
    missing = [seed for seed in seeds if seed not in pairs]
    if missing:
        raise UserError(f"{options.results}: seeds {missing} lack a run of {options.first} or {options.second}")
    chosen = {seed: pairs[seed] for seed in seeds}
    print(make_table(chosen, str(options.first), str(options.second)))
    print(f"\n{LEGEND.format(seeds=', '.join(map(str, chosen)))}")
    differing = [seed for seed, pair in chosen.items() if not pair.has_same_start]
    if differing:
        print(f"Seeds {differing}: the two runs began from different weights, or their weights were not recorded.")


def find_pairs(lines: Sequence[ResultLine], first: MethodRuns, second: MethodRuns) -> dict[int, Pair]:
    """Return the pairs by seed. Raises UserError if a method has two runs of one seed."""
    first_runs = first.select_runs(lines)
    second_runs = second.select_runs(lines)
    seeds = sorted(first_runs.keys() & second_runs.keys())
    return {seed: Pair(first_runs[seed], second_runs[seed]) for seed in seeds}


def make_table(pairs: Pairs, first_name: str, second_name: str) -> str:
    """Return the means, their differences and the differences by seed, as a Markdown table.

    Runs that were evaluated after different samples have rows only for the samples of all, and at equal KL.
    """
    runs = [run for pair in pairs.values() for run in (pair.first.run, pair.second.run)]
    grids = [set(run.samples) for run in runs]
    common = sorted(set.intersection(*grids))
    rows = [_make_curve_row("score", "scores", count, pairs) for count in common]
    rows += [_make_curve_row("KL", "kls", count, pairs) for count in common]
    rows.append(_make_equal_kl_row(pairs))
    if all(grid == grids[0] for grid in grids):
        rows.append(_make_row(f"mean of the last {WINDOW}", pairs, lambda run: run.score))
        rows += [_make_targeting_row(name, label, pairs) for name, label in LABELS.items()]
    return markdown(("", first_name, second_name, "first less second", "by seed"), rows)


def _make_curve_row(label: str, curve: str, count: int, pairs: Pairs) -> list[str]:
    """Return the row of a curve of RunCurve after `count` samples. The last evaluation has no KL."""

    def read_value(run: RunCurve) -> float | None:
        index = run.samples.index(count)
        values = getattr(run, curve)
        return values[index] if index < len(values) else None

    return _make_row(f"{label} after {count:,} samples", pairs, read_value)


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


def _make_targeting_row(name: str, label: str, pairs: Pairs) -> list[str]:
    return _make_row(label, pairs, lambda run: (run.targeting or {}).get(name))


def _make_equal_kl_row(pairs: Pairs) -> list[str]:
    at_equal_kl = [subtract_matched(pair.first.run, pair.second.run, "kls") for pair in pairs.values()]
    differences = [value for value in at_equal_kl if value is not None]
    has_all = len(differences) == len(at_equal_kl)
    cells = _format_differences(differences) if has_all else [NOTHING, NOTHING]
    return ["score at equal KL", NOTHING, NOTHING, *cells]


def _format_differences(differences: list[float]) -> list[str]:
    rounded = [round(difference, 3) + 0.0 for difference in differences]  # + 0.0: else -0.000
    by_seed = ", ".join(f"{difference:.3f}" for difference in rounded)
    return [spread(t_interval(differences)), by_seed]


if __name__ == "__main__":
    sys.exit(main())
