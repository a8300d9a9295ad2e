"""SLF5K: summaries of Reddit posts (Scheurer et al., arXiv 2303.16755), as the hub and as the paper's authors have it.

Understood fields: id; subreddit, title; post or Post; ideal_human_summary or tldr_human_reference_summary (references);
generated_summary, generated_summary_for_feedback and feedback (a human's critique) stay in the payload.
"""

from typing import Any

from t2g.data.chat import Message
from t2g.tasks.base import ANSWER_FORMAT, Record, text_field
from t2g.types import Prompt

POLICY_INSTRUCTION = "Summarize the following Reddit post in one or two sentences.\n\n"
INSTRUCTIONS = (
    "You review a summary of a Reddit post. Say in a short critique what the summary gets right, what it gets wrong "
    "and what it leaves out. Then quote the pieces of the summary that the critique praises (good) and blames (poor): "
    "none, one or two short pieces each, never whole sentences where a few words will do. " + ANSWER_FORMAT
)


class SummarizationTask:
    name = "summarization"
    can_cut = True
    score_name = ""
    policy_instruction = POLICY_INSTRUCTION

    def prompt_id(self, record: Record) -> str | None:
        return str(record["id"]) if record.get("id") is not None else None

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        return [{"role": "user", "content": self.policy_instruction + self.prompt_text(record)[:input_limit]}]

    def prompt_text(self, record: Record) -> str:
        """Subreddit, title and post; whichever of the first two the record has."""
        head = [
            f"{label}: {text_field(record, field)}\n"
            for label, field in (("Subreddit", "subreddit"), ("Title", "title"))
            if record.get(field)
        ]
        return "".join(head) + text_field(record, "post", "Post")

    def payload(self, record: Record) -> dict[str, Any]:
        """All fields but the id and the post, which the prompt holds."""
        return {key: value for key, value in record.items() if key not in ("id", "post", "Post")}

    def reference(self, record: Record) -> str | None:
        names = [n for n in ("ideal_human_summary", "tldr_human_reference_summary") if record.get(n)]
        return text_field(record, *names) if names else None

    def feedback_messages(self, prompt: Prompt, response_text: str, input_limit: int | None = None) -> list[Message]:
        content = f"{INSTRUCTIONS}\n\nPost:\n{prompt.prompt_text[:input_limit]}\n\nSummary:\n{response_text}"
        return [{"role": "user", "content": content}]

    def measure(self, prompt: Prompt, response_text: str) -> dict[str, float] | None:
        return None
