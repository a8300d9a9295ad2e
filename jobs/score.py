"""Ask a trained span reward model about one prompt and response; prints the critique and the coloured spans.

    python -m jobs.score --config configs/tiny/score.yaml --prompt "I bought a phone ..." --text "about a laptop."
    python -m jobs.score --config configs/tiny/score.yaml feedback.reward_model=runs/own-reward/model \
        --prompt @post.txt --text - < summary.txt

Good spans are green and poor ones red; without a terminal, or with NO_COLOR set, they are [+good+] and [-poor-].
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jobs.cli import execute, job_parser
from jobs.evaluate import as_trained, connected_model
from t2g.config import ScoreJob
from t2g.errors import RunStopped, UserError

if TYPE_CHECKING:
    from t2g.types import SpanFeedback


def score(argv: Sequence[str] | None = None) -> int:
    parser = job_parser(ScoreJob)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what was asked: a text, @FILE, or - for stdin")
    parser.add_argument("--text", required=True, metavar="TEXT", help="the response: a text, @FILE, or - for stdin")
    parser.add_argument("--json", action="store_true", help="print the feedback as one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    return execute(parser, arguments, ScoreJob, lambda config: run(config, arguments), describe)


def describe(config: ScoreJob) -> str:
    return f"one question to {config.feedback.reward_model}"


def run(config: ScoreJob, asked: argparse.Namespace) -> None:
    prompt_text, response = read_texts(asked.prompt, asked.text, sys.stdin)
    feedback = judge(as_trained(config), prompt_text, response)
    show(feedback, prompt_text, response, as_json=asked.json)


def read_texts(prompt: str, text: str, stdin: TextIO) -> tuple[str, str]:
    """What --prompt and --text stand for. UserError for a file that cannot be read and for bytes that are no UTF-8."""
    if prompt == text == "-":
        raise UserError("--prompt and --text are both -, and the standard input can be read for one of them only")
    return _read("--prompt", prompt, stdin), _read("--text", text, stdin)


def _read(option: str, value: str, stdin: TextIO) -> str:
    """A file ends with a line end that belongs to the file, not to the text."""
    try:
        if value == "-":
            text = stdin.read().removesuffix("\n")
        elif value.startswith("@"):
            text = Path(value[1:]).read_text(encoding="utf-8").removesuffix("\n")
        else:
            text = value
        text.encode()  # bytes of the command line that are no UTF-8 are half characters here
    except OSError as error:
        raise UserError(f"{option}: {value[1:]} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise UserError(f"{option} {value[:40]!r} is no UTF-8 text") from error
    return text


def judge(config: ScoreJob, prompt_text: str, response: str) -> "SpanFeedback":
    """The answer of the reward model, served for this one question."""
    import numpy as np

    from t2g.types import Prompt

    prompt = Prompt(prompt_id="score", prompt_ids=np.zeros(0, np.int32), prompt_text=prompt_text, task=config.task)
    print("starting the reward model", file=sys.stderr)
    with connected_model(config) as model:
        return asyncio.run(model.judge(prompt, response))


def show(feedback: "SpanFeedback", prompt_text: str, response: str, *, as_json: bool) -> None:
    """Print it. RunStopped for an answer that could not be used."""
    from rich.console import Console

    from t2g.data.sft import USABLE
    from t2g.report.terminal import show_feedback

    if as_json:
        print(json.dumps({"prompt": prompt_text, "response": response, **asdict(feedback)}))  # ASCII: nothing to obey
    elif feedback.status in USABLE:
        show_feedback(Console(), response, feedback)
    if feedback.status not in USABLE:
        raise RunStopped(
            f"the reward model gave no feedback ({feedback.status}): {feedback.reason or 'no reason given'}"
        )


if __name__ == "__main__":
    sys.exit(score())
