import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from t2g.runs import progress
from t2g.runs.progress import format_duration, log_duration, record_lines, show_progress


class Display:
    """What stands in for rich's own console, and for its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self._monkeypatch = monkeypatch

    def on(self, *, terminal: bool) -> Console:
        console = Console(file=StringIO(), force_terminal=terminal, width=100, get_time=lambda: self.now)
        self._monkeypatch.setattr("t2g.runs.progress.get_console", lambda: console)
        return console


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Display:
    return Display(monkeypatch)


def test_without_a_terminal_at_most_a_line_in_ten_seconds(display: Display) -> None:
    out = display.on(terminal=False)
    with show_progress("annotate", 40) as annotate:
        for _ in range(40):
            display.now += 0.7
            annotate.advance()
    # 10.5 s: 15 done, 25 * .7 s left; 21 s: 30 done, 10 * .7 s left; 28 s: done
    assert out.file.getvalue().splitlines() == [
        "annotate: 15 of 40, 18 s left",
        "annotate: 30 of 40, 8 s left",
        "annotate: done in 28 s",
    ]


def test_the_remaining_time_follows_the_speed_of_this_session(display: Display) -> None:
    out = display.on(terminal=False)
    with show_progress("train", 40, 30) as train:
        display.now += 11
        train.advance(True)
        display.now += 11
        train.advance(True)
        display.now += 12
        train.advance(True)
        display.now += 14
        train.advance(True)
    # 34 s: 3 of 10 done, the last two in 23 s, 7 * 11.5 s left; 48 s: 4 done, three in 37 s, 6 * 12.33 s left
    assert out.file.getvalue().splitlines() == [
        "train: going on after 30 of 40",
        "train: 33 of 40, 1 min 21 s left",
        "train: 34 of 40, 1 min 14 s left",
        "train: 34 of 40, ended after 48 s",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_items_give_no_time_left(display: Display, terminal: bool) -> None:
    """The first step of a run compiles kernels: 632 times its length is no estimate."""
    out = display.on(terminal=terminal)
    with show_progress("train", 632) as train:
        for seconds in (33.0, 12.0):
            display.now += seconds
            train.advance()
        assert " left" not in out.file.getvalue().replace("left unknown", "")
        display.now += 12.0
        train.advance()
    text = out.file.getvalue()
    if terminal:
        assert "left unknown" in text
    else:
        assert "train: 3 of 632, 2 h 05 min left" in text  # 629 * 12 s


def test_work_that_is_stopped_is_not_done(display: Display) -> None:
    out = display.on(terminal=False)
    with show_progress("train", 6) as train:
        display.now += 3
        train.advance(2)
    with show_progress("nothing", 0):
        pass
    assert out.file.getvalue().splitlines() == ["train: 2 of 6, ended after 3 s", "nothing: done in 0 s"]


def test_the_phase_of_the_current_item_is_shown(display: Display) -> None:
    out = display.on(terminal=True)
    with show_progress("train", 2) as train:
        train.set_phase("learning [x]")
        assert train.position == "train: 0 of 2, learning [x]"
        train.advance()
    assert "learning [x]" in out.file.getvalue()


def test_a_bar_begins_where_the_last_session_ended(display: Display) -> None:
    out = display.on(terminal=True)
    with show_progress("train", 40, done=30) as train:
        train.advance()
    assert "31/40" in out.file.getvalue()


def test_lines_of_ones_own_are_printed_as_they_are(display: Display) -> None:
    out = display.on(terminal=False)
    with show_progress("train", 1) as train:
        train.print_line("step 3 | [bold]reward[/] " + "x" * 200)
    assert out.file.getvalue().splitlines()[0] == "step 3 | [bold]reward[/] " + "x" * 200


def test_a_terminal_has_a_bar_and_nested_phases(display: Display) -> None:
    out = display.on(terminal=True)
    with show_progress("train", 3) as train:
        train.advance(2)
        with show_progress("evaluate", 5) as evaluate:
            evaluate.advance(5)
        train.print_line("step 2")
    text = out.file.getvalue()
    assert "2/3" in text
    assert "step 2" in text
    assert "evaluate: done in 0 s" in text and "train: 2 of 3, ended after 0 s" in text


def test_a_phase_that_fails_is_not_done(display: Display) -> None:
    out = display.on(terminal=False)
    with pytest.raises(RuntimeError, match="lost"), show_progress("train", 3):
        raise RuntimeError("lost")
    assert out.file.getvalue() == ""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_SILENCE_S", 0.05)
    monkeypatch.setattr(progress, "POLL_S", 0.01)


def wait_for(text: str, file: Path, times: int = 1) -> None:
    deadline = time.monotonic() + 10
    while not (file.exists() and file.read_text().count(text) >= times):
        assert time.monotonic() < deadline, f"{text!r} was never written"
        time.sleep(0.01)


def lines_of(file: Path) -> list[str]:
    return [line.split(" ", 1)[1] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("terminal", [False, True])
def test_work_that_is_silent_says_how_far_it_is_also_into_the_file(
    display: Display, impatient: None, tmp_path: Path, terminal: bool
) -> None:
    out = display.on(terminal=terminal)
    file = tmp_path / "run" / "progress.log"
    with record_lines(file.parent), show_progress("train", 11) as train:
        train.advance(3)
        train.set_phase("feedback")
        wait_for("train: 3 of 11, feedback, ", file)
        train.advance(8)
    assert lines_of(file)[-1] == "train: done in 0 s"
    assert ("so far" in out.file.getvalue()) == (not terminal)  # where the bar is


def test_the_innermost_work_speaks(
    display: Display, impatient: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    display.on(terminal=False)
    with record_lines(tmp_path), show_progress("outer", 2), log_duration("inner"):
        wait_for(" so far", tmp_path / "progress.log", times=4)
    lines = lines_of(tmp_path / "progress.log")
    inner_began = lines.index("inner ...")
    lines_during_inner = lines[inner_began + 1 : -2]  # both end with a line of their own
    assert len(lines_during_inner) >= 3
    assert all(line.startswith("inner: ") for line in lines_during_inner)
    assert lines[-1] == "outer: 0 of 2, ended after 0 s"
    assert "inner: " in capsys.readouterr().err


class Clock:
    """Fake of the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_no_line_is_added_while_others_are_printed(
    display: Display, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line each .9 s, where a silence of 1 s is too long."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "POLL_S", 0.01)
    monkeypatch.setattr(progress, "MAX_SILENCE_S", 1.0)
    display.on(terminal=False)
    with record_lines(tmp_path), show_progress("train", 2) as train:
        for _ in range(7):
            train.print_line("step")
            clock.now += 0.9
            time.sleep(0.05)
        train.advance(2)
    assert not any("so far" in line for line in lines_of(tmp_path / "progress.log"))


def test_a_bar_never_goes_back(display: Display) -> None:
    display.on(terminal=False)
    with show_progress("train", 9) as train:
        train.advance_to(5)
        train.advance_to(3)
        assert train.position == "train: 5 of 9"


def test_duration() -> None:
    assert [format_duration(s) for s in (0.4, 59.6, 75, 3700, 90_000)] == [
        "0 s",
        "1 min 00 s",
        "1 min 15 s",
        "1 h 01 min",
        "25 h 00 min",
    ]
