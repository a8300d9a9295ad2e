"""Text that nobody vouches for is read in time that grows with its length, not with the square of it."""

import time
from collections.abc import Callable

import numpy as np
import pytest

from t2g.feedback.rewards import compute_sentence_ids, token_rewards
from t2g.feedback.sentences import find_sentence
from t2g.tasks import code_feedback, human_eval
from t2g.tasks.base import Task
from t2g.tasks.code import _find_imported_names, extract_code
from t2g.tasks.tiny.revision import split_sentences
from t2g.tasks.tiny.world import split_clauses
from t2g.text.quotes import locate
from t2g.types import Span

LENGTH = 8_000  # characters; then doubled twice


def steps(text: str) -> None:
    compute_sentence_ids(np.zeros((1, 2)), text, Task.step_pattern)


def program(text: str) -> None:
    for pattern in (human_eval._IMPORT, human_eval._FUNCTION, code_feedback._CONDITION, code_feedback._OTHERWISE):
        list(pattern.finditer(text))


def drastic(text: str) -> None:
    for pattern in code_feedback._DRASTIC.values():
        pattern.search(text)


def last_sentence(text: str) -> None:
    find_sentence(text, text[-9:])


def absent_quote(text: str) -> None:
    locate(text, text[: LENGTH // 2] + "?")


# What reads, and the pieces of which its texts repeat one.
IMPORTS = ("\n", "from solution import (\n", "from solution import\n", "from\n")
LINES = ("from\n", "def ", "def \n", "case ", "else ", "import ")
REPEATED: list[tuple[Callable[[str], object], tuple[str, ...]]] = [
    (_find_imported_names, IMPORTS),
    (steps, (".", ".\n", "?! ")),
    (program, LINES),
    (drastic, ("spawn", "_exit", "kill")),
    (split_clauses, ("by ", ",", " ")),
    (split_sentences, (". ",)),
    (last_sentence, (".a",)),
    (absent_quote, ("a",)),
]
# What reads, how the text begins, what it repeats.
READERS: list[tuple[Callable[[str], object], str, str]] = [
    (extract_code, "```", piece) for piece in (" ", "a", " a", "\n", " \n", "`", "\n```")
]
for read, pieces in REPEATED:
    READERS += [(read, "", piece) for piece in pieces]


def seconds(read: Callable[[str], object], text: str) -> float:
    """Processor time, which other programs do not lengthen much; the best of several, which they seldom lengthen."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        read(text)
        best = min(best, time.process_time() - started)
    return best


@pytest.mark.parametrize(("read", "start", "repeated"), READERS)
def test_reading_takes_time_in_proportion(read: Callable[[str], object], start: str, repeated: str) -> None:
    """Twice the text takes twice the time, so four times as long a text four times: the square would be sixteen."""
    short, long = (start + (repeated * length)[:length] + "a" for length in (LENGTH, 4 * LENGTH))
    needed_s = seconds(read, long)
    allowed_s = 9 * seconds(read, short)
    assert needed_s < max(allowed_s, 2e-3)


def test_rewards_of_a_long_response_with_many_spans_take_milliseconds() -> None:
    """32,000 tokens and 200 spans; half a second when each span was compared with each character."""
    num_tokens = 32_000
    starts = np.arange(num_tokens) * 2
    offsets = np.stack([starts, starts + 2], axis=1).astype(np.int32)
    text = "ab" * num_tokens
    spans = [Span(start=int(start), end=int(start) + 12, label=1) for start in np.linspace(0, len(text) - 12, 200)]

    def pay(text: str) -> None:
        rewards = token_rewards(offsets, spans, text=text)
        assert np.count_nonzero(rewards) >= 200

    assert seconds(pay, text) < 0.25
