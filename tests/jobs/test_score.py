"""jobs.score but for the engine: where the texts come from, and what is printed of an answer."""

from pathlib import Path

import pytest

from jobs.score import read_text, score, show
from t2g.errors import RunStopped, UserError
from t2g.feedback.parse import make_failed_feedback, parse_answer
from t2g.types import SpanFeedback

ANSWER = '{"critique": "Ann is \\u001b[31mright", "good": ["Ann"], "poor": ["laptop"]}'


def feedback(answer: str = ANSWER) -> SpanFeedback:
    return parse_answer(answer, "a laptop by Ann", source="reward_model", version="v")


def test_texts_are_given_or_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "post.txt"
    file.write_text("a post\nof two lines\n", encoding="utf-8")
    assert read_text("--prompt", f"@{file}") == "a post\nof two lines"
    assert read_text("--text", "text\n") == "text\n"


def test_texts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"--prompt: /no/such.txt cannot be read: No such file"):
        read_text("--prompt", "@/no/such.txt")
    with pytest.raises(UserError, match=r"--text '@.*is no UTF-8 text"):
        read_text("--text", f"@{tmp_path / 'latin.txt'}")
    with pytest.raises(UserError, match=r"--prompt 'caf.*' is no UTF-8 text"):
        read_text("--prompt", "caf\udce9")  # as Python hands over such a byte of the command line


def test_critique_and_marked_spans_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show(feedback(), "a laptop by Ann")
    out = capsys.readouterr().out
    assert out.startswith("Ann is ␛[31mright\n\na [-laptop-] by [+Ann+]\n")
    assert 'poor, severity 1: "laptop"' in out


def test_no_feedback_is_an_error_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    failed = make_failed_feedback("failed", source="reward_model", version="v", reason="the response is too long")
    with pytest.raises(RunStopped, match=r"gave no feedback \(failed\): the response is too long"):
        show(failed, "r")
    assert capsys.readouterr().out == ""


def test_a_missing_model_is_reported_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "score.yaml"
    config.write_text("feedback: {reward_model: runs/demo/reward/no-model}\n")
    assert score(["--config", str(config), "--prompt", "a", "--text", "b"]) == 2
    assert "feedback.reward_model=runs/demo/reward/no-model: there is no folder of that name" in capsys.readouterr().err
    assert score(["--config", str(config), "--prompt", "a", "--text", "b", "feedback.source=program"]) == 2
    assert "feedback.source=program cannot be evaluated" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["--prompt", "--text"])
def test_both_texts_are_needed(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [word for option in ("--prompt", "--text") if option != missing for word in (option, "x")]
    with pytest.raises(SystemExit) as caught:
        score(["--config", "x.yaml", *options])
    assert caught.value.code == 2
    assert missing in capsys.readouterr().err
