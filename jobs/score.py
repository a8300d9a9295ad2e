"""Ask a trained span reward model about one prompt and response.

    python -m jobs.score --config configs/tiny/score.yaml --prompt "I bought a phone ..." --text "about a laptop."
    python -m jobs.score --config configs/own/score.yaml feedback.reward_model=runs/own-reward/model \
        --prompt @post.txt --text @summary.txt

Good spans are green and poor ones red; without a terminal, or with NO_COLOR set, they are [+good+] and [-poor-].
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jobs.common.cli import main
from t2g.config import ScoreJob
from t2g.errors import RunStopped, UserError
from t2g.report.terminal import show_feedback
from t2g.types import Prompt, SpanFeedback


def score(argv: Sequence[str] | None = None) -> int:
    help_texts = {"--prompt": "the prompt: a text, or @FILE", "--text": "the response: a text, or @FILE"}
    shared = {"required": True, "metavar": "TEXT"}
    options = {option: {**shared, "help": text} for option, text in help_texts.items()}
    return main(ScoreJob, run, describe, argv, options)


def describe(config: ScoreJob) -> str:
    return f"one question to {config.feedback.reward_model}"


def run(config: ScoreJob, prompt: str, text: str) -> None:
    from jobs.train_reward.reward_models import serve_reward_model, with_trained_style

    config = with_trained_style(config)
    prompt_text = read_text("--prompt", prompt)
    item = Prompt(prompt_id="score", prompt_text=prompt_text, task=config.task)
    response = read_text("--text", text)
    with serve_reward_model(config) as model:
        feedback = asyncio.run(model.judge(item, response))
    show(feedback, response)


def read_text(option: str, value: str) -> str:
    """Return the text of --prompt or --text. Raises UserError for an unreadable file or bytes that are no UTF-8."""
    try:
        # A file ends with a line end that belongs to the file, not to the text.
        text = value
        if value.startswith("@"):
            text = Path(value[1:]).read_text(encoding="utf-8").removesuffix("\n")
        text.encode()  # bytes of the command line that are no UTF-8 are half characters here
    except OSError as error:
        raise UserError(f"{option}: {value[1:]} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise UserError(f"{option} {value[:40]!r} is no UTF-8 text") from error
    return text


def show(feedback: SpanFeedback, response: str) -> None:
    """Print it. RunStopped for an answer that could not be used."""
    if not feedback.usable:
        reason = feedback.reason or "no reason given"
        raise RunStopped(f"the reward model gave no feedback ({feedback.status}): {reason}")
    show_feedback(Console(), response, feedback)


if __name__ == "__main__":
    sys.exit(score())
