"""The tasks of `make real`: summaries of research findings, and measures that the feedback function does not use.

The feedback function (`findings_feedback`) quotes the names, numbers and dates that a summary invents. Here the same
fault is measured by another definition. Further metrics show evasion: shorter summaries, copied text, and, where every
finding is to be reported in a line of its own, details that are left out.
"""

import re
from collections.abc import Container, Sequence

from t2g.config import StyleConfig
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import FeedbackFunction, Review
from t2g.tasks.findings_feedback import feedback_function
from t2g.tasks.summarization import SummarizationTask
from t2g.types import Prompt

COPIED_RUN = 4  # tokens in a row
LONG_WORD_CHARS = 4
STEM_CHARS = 5
_NUMERALS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_LISTED = re.compile(r"^[^\S\n]*+\d+[.)]\s", re.MULTILINE)  # not \s: matching line ends would take quadratic time
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[.!?:\n]")


class FindingsTask(SummarizationTask):
    name = "findings"
    score_name = "faithful"
    instruction = "Summarize the following findings in one or two sentences.\n\n"
    review = Review(
        opening="You review a short summary of scientific findings.",
        input_name="Findings",
        subject="summary",
        sparse="one to three short pieces, a few words each",
        labels="Good is what the findings say; poor is what they do not say, or what is said twice.",
    )

    def make_feedback_function(self, *, style: StyleConfig, sandbox: SandboxConfig) -> FeedbackFunction | None:
        return feedback_function

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Return `measure_faithfulness`, ROUGE where there is a reference, and `faithful`, 1 less `invents`."""
        rouge = super().measure(prompt, response_text, sandbox=sandbox) or {}
        measured = measure_faithfulness(prompt.prompt_text, response_text)
        return rouge | measured | {"faithful": 1 - measured["invents"]}


class FindingLinesTask(FindingsTask):
    """Report each finding in a line of its own. The reference has the line of each."""

    name = "finding_lines"
    score_name = "detail_f1"
    instruction = "Report each of the following findings in one line. Keep every name and number.\n\n"

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Return the measures of `FindingsTask`, and `detail_recall` and `detail_f1` where there is a reference.

        Recall is the share of the reference's details that the response has. Precision is 1 less `invented`.
        """
        measured = super().measure(prompt, response_text, sandbox=sandbox) or {}
        reference = self.reference(prompt.payload)
        if reference is None:
            return measured
        expected = set(find_measured_details(reference))
        reported = set(find_measured_details(response_text))
        recall = 1.0
        if expected:
            recall = len(expected & reported) / len(expected)
        precision = 0.0
        if reported:
            precision = 1 - measured["invented"]
        f1 = 0.0
        if precision + recall:
            f1 = 2 * precision * recall / (precision + recall)
        return measured | {"detail_recall": recall, "detail_f1": f1}


def measure_faithfulness(text: str, summary: str) -> dict[str, float]:
    """Return word-level measures of invention and evasion of a summary.

    A detail is a number, compared by value (`two` is 2, 1,000 is 1000), or a capitalised word that does not begin a
    sentence, compared by its first five letters.

    - invents: 1 if at least one detail is not in the text, else 0.
    - invented: share of the details that are not in the text; 0 without details.
    - details: their number.
    - novel: share of tokens of four or more letters whose first five letters begin no word of the text.
    - copied: share of tokens in runs of four or more that the text also has.

    >>> measure_faithfulness("Zinc helped two of 60.", "In Rome zinc helped 2.")
    {'invents': 1.0, 'invented': 0.5, 'details': 2.0, 'novel': 0.3333333333333333, 'copied': 0.0}
    """
    source = _TOKEN.findall(text)
    tokens = _TOKEN.findall(_LISTED.sub("", summary))
    source_values = {_normalize(token) for token in source}
    details = find_measured_details(summary)
    long_tokens = [token for token in tokens if token.isalpha() and len(token) >= LONG_WORD_CHARS]
    long_values = [_normalize(token) for token in long_tokens]
    invented = _share_outside(details, source_values)
    return {
        "invents": float(invented > 0),
        "invented": invented,
        "details": float(len(details)),
        "novel": _share_outside(long_values, source_values),
        "copied": compute_copied_share(_lower_words(source), _lower_words(tokens)),
    }


def _share_outside(values: Sequence[str], source: Container[str]) -> float:
    """Return the share of the values that the source does not have; 0 without values."""
    if not values:
        return 0.0
    return sum(value not in source for value in values) / len(values)


def _lower_words(tokens: Sequence[str]) -> list[str]:
    return [token.lower() for token in tokens if token.isalnum()]


def find_measured_details(summary: str) -> list[str]:
    """Return the compared values of a summary's details, see `measure_faithfulness`."""
    tokens = _TOKEN.findall(_LISTED.sub("", summary))
    details = []
    for before, token in zip([".", *tokens], tokens, strict=False):
        begins_sentence = before in ".!?:\n"
        is_name = token[0].isupper() and len(token) > 1 and not begins_sentence
        if _is_number(token) or is_name:
            details.append(_normalize(token))
    return details


def compute_copied_share(source: Sequence[str], summary: Sequence[str]) -> float:
    """Return the share of the summary's tokens that lie in a run of COPIED_RUN or more of the source."""
    if not summary:
        return 0.0
    source_runs = set(_runs(source))
    inside = set[int]()
    for start, run in enumerate(_runs(summary)):
        if run in source_runs:
            inside.update(range(start, start + COPIED_RUN))
    return len(inside) / len(summary)


def _runs(tokens: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every COPIED_RUN tokens in a row, in order."""
    num_runs = len(tokens) - COPIED_RUN + 1
    return [tuple(tokens[start : start + COPIED_RUN]) for start in range(num_runs)]


def _is_number(token: str) -> bool:
    return token[0].isdecimal() or token.lower() in _NUMERALS


def _normalize(token: str) -> str:
    """Return the value by which tokens are compared: 1000 for 1,000, 2 for two, the first five letters of a word."""
    word = token.lower()
    if word in _NUMERALS:
        return str(_NUMERALS.index(word))
    if not token[0].isdecimal():  # isdigit accepts "²", which float refuses
        return word[:STEM_CHARS]
    number = token.replace(",", "")
    return f"{float(number):g}" if number.count(".") <= 1 else number
