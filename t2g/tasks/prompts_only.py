"""The default task for a user's own data: arbitrary prompts, judged by general criteria.

{"prompt": "Why is the sky blue?"}
{"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "..."}], "reference": "..."}
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"prompt": [{"role": "user", "content": "..."}], "completion": [{"role": "assistant", "content": "..."}]}
{"instruction": "Translate to French.", "input": "Good morning.", "output": "Bonjour."}

The third form is OpenAI's for fine-tuning: the last message is the reference, and the response to annotate. The fourth
is TRL's, the fifth Alpaca's; `completion` and `output` are references.
"""

from collections.abc import Sequence
from typing import Any

from t2g.tasks.base import Record, Review, Task, get_text
from t2g.text.messages import get_content, get_role, read_content
from t2g.text.tokenizer import Message

ROLES = ("system", "user", "assistant")


class PromptsTask(Task):
    """Records with `prompt`, a text or a chat, `messages` or `instruction`. The reference and all else are payload.

    If `messages` end with the assistant's, this last message is the reference and the response, unless the record has
    these fields. Where a record has `messages`, a text `prompt` is a part of them and not read. A text `system` is
    the system message.
    """

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
        if record.get("reference") is not None:
            return get_answer(record, "reference")
        if _has_answer(record.get("completion")):
            return get_answer(record, "completion")
        if record.get("instruction") is not None and _has_answer(record.get("output")):
            return get_answer(record, "output")
        return self._last_answer(record)

    def response(self, record: Record) -> str | None:
        if record.get("response") is not None:
            return get_answer(record, "response")
        return self._last_answer(record)

    def _last_answer(self, record: Record) -> str | None:
        """Return the text of the assistant's message with which `messages` end, None if they end otherwise."""
        if isinstance(record.get("prompt"), list) or not isinstance(record.get("messages"), list):
            return None
        last = read_messages(record["messages"], "messages")[-1]
        if last["role"] != "assistant":
            return None
        return get_text(last, "content")

    def _messages(self, record: Record) -> list[Message]:
        system = record.get("system")
        messages = self._messages_without_system(record)
        if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
            return [{"role": "system", "content": system}, *messages]
        return messages

    def _messages_without_system(self, record: Record) -> list[Message]:
        """Return the messages without the text of a field `system`."""
        prompt = record.get("prompt")
        chat = record.get("messages")
        if isinstance(prompt, list):
            return _read_chat(prompt, "prompt")
        if isinstance(chat, list) or (chat is not None and prompt is None):
            return _read_chat(chat, "messages")
        text = get_text(record, "prompt", "messages", "instruction")
        further = record.get("input")
        if prompt is None and isinstance(further, str) and further.strip():
            text = f"{text}\n\n{further}"
        return [{"role": "user", "content": text}]


def _read_chat(value: Any, name: str) -> list[Message]:
    """Return the messages of a field, of `messages` without a last answer of the assistant."""
    messages = read_messages(value, name)
    if name == "messages" and len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last of {name} is by {messages[-1]['role']}; the policy answers a user")
    if not messages[-1]["content"].strip():
        raise ValueError(f"the last of {name} is empty; the policy answers a user")
    return messages


def _has_answer(value: Any) -> bool:
    """Return whether a value is a text or a conversation: a field of another meaning may have the same name."""
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def get_answer(record: Record, field: str) -> str:
    """Return the text of a field that is a text, or a conversation that ends with the assistant's message.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(record[field], list):
        return get_text(record, field)
    last = read_messages(record[field], field)[-1]
    if last["role"] != "assistant":
        raise ValueError(f"field {field} ends with a message by {last['role']}; a response is by assistant")
    return get_text(last, "content")


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
    messages = []
    for index, message in enumerate(value):
        role = get_role(message) if isinstance(message, dict) else None
        text, is_complete = read_content(get_content(message)) if role in ROLES else ("", False)
        if not is_complete:
            raise ValueError(f"{name}[{index}] needs a role, one of {', '.join(ROLES)}, and a content that is text")
        messages.append({"role": str(role), "content": text})
    return messages
