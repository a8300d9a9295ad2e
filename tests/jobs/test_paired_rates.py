"""The table of two methods, each at its own rate, from lines that are short enough to do by hand."""

from pathlib import Path

import pytest

from jobs.compare.paired_rates import MethodRuns, Pair, find_pairs, main
from t2g.errors import UserError
from t2g.study.comparison import RunCurve
from t2g.study.result_lines import ResultLine

SPAN = MethodRuns("span", 3e-3)
SCALAR = MethodRuns("scalar", 1e-3)


def make_line(name: MethodRuns, seed: int, *scores: float, kls: tuple[float, ...], criticised: float) -> ResultLine:
    """Return a run that was evaluated before training and after each step of 10 samples."""
    indices = range(len(scores))
    run = RunCurve(
        samples=tuple(10 * index for index in indices),
        scores=scores,
        seconds=tuple(1.0 * index for index in indices),
        step_seconds=1.0,
        targeting={"criticised": criticised},
        kls=kls,
    )
    return ResultLine(
        method=name.method,
        seed=seed,
        lr=name.lr,
        key=f"{name}-{seed}",
        date="2026-11-29",
        minutes=1,
        versions={},
        run=run,
    )


SPAN_LINES = [
    make_line(SPAN, 1, 0.5, 0.8, 0.9, kls=(0.0, 2.0, 4.0), criticised=-1.0),
    make_line(SPAN, 2, 0.5, 0.7, 0.9, kls=(0.0, 2.0, 4.0), criticised=-2.0),
]
WITHOUT_PAIR = make_line(SPAN, 3, 0.5, 0.9, 0.9, kls=(0.0, 2.0, 4.0), criticised=-3.0)
SCALAR_LINES = [
    make_line(SCALAR, 1, 0.5, 0.6, 0.8, kls=(0.0, 1.0, 2.0), criticised=-0.5),
    make_line(SCALAR, 2, 0.5, 0.7, 0.7, kls=(0.0, 1.0, 2.0), criticised=-0.5),
]
LARGE_RATE = make_line(MethodRuns("scalar", 3e-3), 3, 0.5, 0.1, 0.1, kls=(0.0, 9.0, 9.0), criticised=0.0)
SEARCH_LINES = [
    make_line(SPAN, 101, 0.5, 0.9, kls=(0.0, 2.0), criticised=-1.0),
    make_line(SCALAR, 101, 0.5, 0.4, kls=(0.0, 2.0), criticised=-1.0),
]
SEARCH_LINES = [line.model_copy(update={"held_out": "others"}) for line in SEARCH_LINES]
LINES = [*SPAN_LINES, *SCALAR_LINES, WITHOUT_PAIR, LARGE_RATE, *SEARCH_LINES]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{line.model_dump_json()}\n" for line in LINES))
    return path


def read_rows(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_a_pair_has_a_whole_run_of_both_methods_at_their_rates() -> None:
    pairs = find_pairs(LINES, SPAN, SCALAR)
    assert [*pairs] == [1, 2]
    assert pairs[1] == Pair(SPAN_LINES[0], SCALAR_LINES[0])
    assert pairs[2] == Pair(SPAN_LINES[1], SCALAR_LINES[1])
    assert find_pairs([], SPAN, SCALAR) == {}
    assert find_pairs(SEARCH_LINES, SPAN, SCALAR) == {}


def test_the_table_has_differences_and_their_interval(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(results), "span=3e-3", "scalar=0.001"]) == 0
    rows = read_rows(capsys.readouterr().out)
    half = 12.706 * 0.05  # t with one degree of freedom; the standard error of two values .1 apart is .05
    assert rows["mean of the last 3"][2:] == [f"0.125 ± {half / 2:.3f}", "0.150, 0.100"]
    assert rows["score after 10 samples"][2:] == [f"0.100 ± {2 * half:.3f}", "0.200, 0.000"]
    assert rows["score after 20 samples"][0] == "0.900 ± 0.000"
    assert rows["KL after 20 samples"] == ["4.000 ± 0.000", "2.000 ± 0.000", "2.000 ± 0.000", "2.000, 2.000"]
    assert rows["score at equal KL"][2:] == ["0.000 ± 0.000", "0.000, 0.000"]  # at 2 nats: .8 and .8, .7 and .7
    assert rows["Δ log p of criticised tokens"][:2] == [f"-1.500 ± {10 * half:.3f}", "-0.500 ± 0.000"]
    assert rows["Δ log p of compare.retention"] == ["–"] * 4  # not measured

    assert main([str(results), "span=3e-3", "scalar=1e-3", "--seeds", "2"]) == 0
    assert read_rows(capsys.readouterr().out)["mean of the last 3"] == ["0.800", "0.700", "0.100", "0.100"]


def test_runs_that_make_no_pair_end_with_a_sentence(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(results), "span=3e-3", "grpo=1e-3"]) == 2
    message = capsys.readouterr().err
    assert "grpo at 0.001" in message and "scalar=0.001, scalar=0.003, span=0.003" in message
    assert main([str(results), "span=3e-3", "scalar=1e-3", "--seeds", "2", "3", "9"]) == 2
    assert "[3, 9]" in capsys.readouterr().err
    assert main([str(results.with_name("none.jsonl")), "span=3e-3", "scalar=1e-3"]) == 2
    with pytest.raises(SystemExit):
        main([str(results), "span", "scalar=1e-3"])
    with pytest.raises(SystemExit):
        main([str(results), "span=3e-3@", "scalar=1e-3"])


def test_runs_that_cannot_be_compared_are_refused() -> None:
    again = LINES[0].model_copy(update={"key": "other"})
    with pytest.raises(UserError, match=r"two runs of seed 1, with the keys .* and other"):
        find_pairs([*LINES, again], SPAN, SCALAR)


def test_runs_with_other_evaluations_are_compared_where_they_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short_run = RunCurve(samples=(0, 5, 10), scores=(0.5, 0.7, 0.8), seconds=(0, 1, 2), step_seconds=1, kls=(0.0, 1.0))
    short = SPAN_LINES[0].model_copy(update={"key": "short", "run": short_run})
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{line.model_dump_json()}\n" for line in [short, *LINES]))

    assert main([str(path), "span=3e-3@10", "scalar=1e-3"]) == 0
    rows = read_rows(capsys.readouterr().out)
    assert rows["score after 0 samples"] == ["0.500", "0.500", "0.000", "0.000"]
    assert rows["score after 10 samples"] == ["0.800", "0.600", "0.200", "0.200"]
    assert rows["score at equal KL"][2:] == ["0.100", "0.100"]  # at 1 nat: .7 and .6
    assert rows.keys() & {"score after 5 samples", "score after 20 samples"} == set()
    assert rows.keys() & {"mean of the last 3", "matched difference"} == set()

    assert find_pairs([short, *LINES], SPAN, SCALAR) == find_pairs(LINES, SPAN, SCALAR)  # the longest runs


def test_a_longer_run_of_another_method_changes_nothing() -> None:
    longer = make_line(MethodRuns("grpo", 1e-3), 1, 0.5, 0.6, 0.7, 0.8, kls=(0.0, 1.0, 2.0, 3.0), criticised=-1.0)
    assert find_pairs([*LINES, longer], SPAN, SCALAR) == find_pairs(LINES, SPAN, SCALAR)


def test_seeds_whose_runs_began_from_other_weights_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [SPAN_LINES[0], SCALAR_LINES[0], SPAN_LINES[1], SCALAR_LINES[1]]
    starts = ["a", "a", "a", "b"]
    lines = [line.model_copy(update={"start": start}) for line, start in zip(pairs, starts, strict=True)]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
    assert main([str(path), "span=3e-3", "scalar=1e-3"]) == 0
    assert "Seeds [2]: " in capsys.readouterr().out
