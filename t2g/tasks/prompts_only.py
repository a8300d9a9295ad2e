"""The default task for a user's own data: arbitrary prompts, judged by general criteria.

{"prompt": "Why is the sky blue?"}
{"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "..."}], "reference": "..."}
"""

from collections.abc import Sequence
from typing import Any

from t2g.tasks.base import Record, Review, Task, get_optional_text, get_text
from t2g.text.tokenizer import Message

ROLES = ("system", "user", "assistant")


class PromptsTask(Task):
    """Records with `prompt`, a text or a chat as in TRL, or `messages`. `reference` and all else are payload."""

    name = "prompts"
    input_fields = ("prompt", "messages")
    review = Review(
        opening="You review a response to a prompt: its accuracy, relevance, clarity and completeness.",
        input_name="Prompt",
        subject="response",
        sparse="a few of each at most, only what decides, and short",
        questions="What does the user ask for, and what does the user need but not say? Is the response accurate? "
        "Does it keep to the subject? Is it clear? Does it cover what is needed? Which of its words show each of these "
        "strengths and weaknesses? How well are the needs met, said and unsaid? Which of all these points matter most?",
    )

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        return self._messages(record)

    def prompt_text(self, record: Record) -> str:
        return format_chat(self._messages(record))

    def reference(self, record: Record) -> str | None:
        return get_optional_text(record, "reference")

    def _messages(self, record: Record) -> list[Message]:
        name = "prompt" if isinstance(record.get("prompt"), list) else "messages"
        if name == "messages" and (record.get("prompt") is not None or record.get("messages") is None):
            return [{"role": "user", "content": get_text(record, "prompt", "messages")}]
        messages = read_messages(record[name], name)
        if messages[-1]["role"] != "user":
            raise ValueError(f"the last of {name} is by {messages[-1]['role']}; the policy answers a user")
        return messages


def format_chat(messages: Sequence[Message]) -> str:
    """Return a single message unchanged, or a conversation with the role before each message."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def read_messages(value: Any, name: str) -> list[Message]:
    """Return the messages of field `name`, reduced to role and content.

    Raises:
        ValueError: The value is no list of messages, or empty.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {name} is no list of {{role, content}}")
    for i, message in enumerate(value):
        has_content = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not has_content or message.get("role") not in ROLES:
            raise ValueError(f"{name}[{i}] needs a role, one of {', '.join(ROLES)}, and a content that is text")
    return [{"role": message["role"], "content": message["content"]} for message in value]
