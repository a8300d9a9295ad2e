"""SLF5K: summaries of Reddit posts (Scheurer et al., arXiv 2303.16755), in the formats of the hub and of the authors.

Fields: id; subreddit, title; post or Post; ideal_human_summary or tldr_human_reference_summary (references);
response, generated_summary or generated_summary_for_feedback: the summary to judge; feedback (a human's, of that
summary).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from t2g.sandbox import SandboxConfig
from t2g.tasks.base import Record, Review, Task, get_text
from t2g.text.tokenizer import Message
from t2g.types import Prompt

ROUGE = ("rouge1", "rouge2", "rougeL")


class SummarizationTask(Task):
    name = "summarization"
    score_name = "rougeL"
    input_fields = ("post", "Post")
    instruction = "Summarize the following Reddit post in one or two sentences.\n\n"
    review = Review(
        opening="You review a summary of a Reddit post: what it gets right, what it gets wrong and what it leaves out.",
        input_name="Post",
        subject="summary",
        sparse="none, one or two short pieces each, never whole sentences where a few words will do",
        labels="Good is what states the point of the post or a key detail rightly and briefly; poor is what is "
        "inaccurate, says something again, is badly worded, or takes the place of something more important.",
        questions="What are the main points of the post? Which of them does the summary state, and state rightly? What "
        "that matters does it leave out? What in it is inaccurate, misleading or said twice? Which words help it most, "
        "and which harm it most?",
    )

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        text = self.prompt_text(record)[:input_limit]
        return [{"role": "user", "content": self.instruction + text}]

    def prompt_text(self, record: Record) -> str:
        """Return subreddit, title and post; the first two are optional."""
        text = ""
        for label, field in (("Subreddit", "subreddit"), ("Title", "title")):
            if record.get(field):
                text += f"{label}: {get_text(record, field)}\n"
        return text + get_text(record, "post", "Post")

    def reference(self, record: Record) -> str | None:
        return _get_first_text(record, "ideal_human_summary", "tldr_human_reference_summary")

    def response(self, record: Record) -> str | None:
        return _get_first_text(record, "response", "generated_summary", "generated_summary_for_feedback")

    def own_notes(self, payload: Mapping[str, Any]) -> str | None:
        feedback = _get_first_text(payload, "feedback")
        if not feedback:
            return None
        return f"A human's feedback on this summary:\n{feedback}"

    def can_measure(self, prompt: Prompt) -> bool:
        try:
            return self.reference(prompt.payload) is not None
        except ValueError:  # blank, or no text
            return False

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Return ROUGE F1, 0 to 1 (Lin, 2004; with Porter's stemmer), or None without a reference."""
        reference = self.reference(prompt.payload)
        if reference is None:
            return None
        scores = _rouge_scorer().score(reference, response_text)
        return {name: float(scores[name].fmeasure) for name in ROUGE}


def _get_first_text(record: Record, *names: str) -> str | None:
    present = [name for name in names if record.get(name)]
    return get_text(record, *present) if present else None


@lru_cache(maxsize=1)
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # takes a second: it imports nltk

    return RougeScorer(list(ROUGE), use_stemmer=True)
