"""The task of `make real`: summaries of research findings, and a measure that the feedback function does not use.

The feedback function (`findings_feedback`) quotes the names, numbers and dates that a summary invents. Here the same
fault is measured by another definition. Two further metrics show evasion: shorter summaries, and copied text.
"""

import re
from collections.abc import Sequence

from t2g.sandbox import SandboxConfig
from t2g.tasks.base import Review
from t2g.tasks.summarization import SummarizationTask
from t2g.types import Prompt

COPIED_WORDS = 4  # in a row
STEM_CHARS = 5
_NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_LISTED = re.compile(r"^\s*\d+[.)]\s", re.MULTILINE)
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[.!?:\n]")


class FindingsTask(SummarizationTask):
    name = "findings"
    instruction = "Summarize the following findings in one or two sentences.\n\n"
    review = Review(
        opening="You review a short summary of scientific findings.",
        input_name="Findings",
        subject="summary",
        sparse="one to three short pieces, a few words each",
        labels="Good is what the findings say; poor is what they do not say, or what is said twice.",
    )

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """ROUGE where there is a reference, and `faithfulness`."""
        rouge = super().measure(prompt, response_text, sandbox=sandbox) or {}
        return rouge | faithfulness(prompt.prompt_text, response_text)


def faithfulness(text: str, summary: str) -> dict[str, float]:
    """What a summary says that its text does not, word by word, and what it could hide behind.

    A detail is a number, by its value (`two` is 2, 1,000 is 1000), or a word with a capital that opens no sentence, by
    its first five letters. invents: 1 where one detail or more is not in the text; invented: the share of the details
    that are not, 0 without any; details: how many; novel: the share of the words of four letters and more whose first
    five stand at the beginning of no word of the text; copied: the share of its words in four or more in a row that the
    text has as well.

    >>> faithfulness("Zinc helped two of 60.", "In Rome zinc helped 2.")
    {'invents': 1.0, 'invented': 0.5, 'details': 2.0, 'novel': 0.3333333333333333, 'copied': 0.0}
    """
    source, said = _TOKEN.findall(text), _TOKEN.findall(_LISTED.sub("", summary))
    known = {_value(token) for token in source}
    details = [
        _value(token)
        for before, token in zip([".", *said], said, strict=False)
        if _is_number(token) or (token[0].isupper() and len(token) > 1 and before not in ".!?:\n")
    ]
    num_invented = sum(detail not in known for detail in details)
    long = [_value(token) for token in said if token.isalpha() and len(token) >= COPIED_WORDS]
    return {
        "invents": float(num_invented > 0),
        "invented": num_invented / len(details) if details else 0.0,
        "details": float(len(details)),
        "novel": sum(word not in known for word in long) / len(long) if long else 0.0,
        "copied": copied([t.lower() for t in source if t.isalnum()], [t.lower() for t in said if t.isalnum()]),
    }


def copied(source: Sequence[str], said: Sequence[str]) -> float:
    """The share of the words said that lie in a run of COPIED_WORDS or more of the source. 0 without words."""
    runs = {tuple(source[i : i + COPIED_WORDS]) for i in range(len(source) - COPIED_WORDS + 1)}
    inside = {
        i + place
        for i in range(len(said) - COPIED_WORDS + 1)
        if tuple(said[i : i + COPIED_WORDS]) in runs
        for place in range(COPIED_WORDS)
    }
    return len(inside) / len(said) if said else 0.0


def _is_number(token: str) -> bool:
    return token[0].isdigit() or token.lower() in _NUMBER_WORDS


def _value(token: str) -> str:
    """By what two tokens are one: 1,000 and 1000, two and 2, Studies and study's first five letters."""
    word = token.lower()
    if word in _NUMBER_WORDS:
        return str(_NUMBER_WORDS.index(word))
    if not token[0].isdigit():
        return word[:STEM_CHARS]
    number = token.replace(",", "")
    return f"{float(number):g}" if number.count(".") <= 1 else number
