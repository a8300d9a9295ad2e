"""The prompts-only task: any questions, judged in general terms. What a user's own data walks through.

{"prompt": "Why is the sky blue?"}
{"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "..."}], "reference": "..."}
"""

from typing import Any

from t2g.data.chat import Message
from t2g.tasks.base import ANSWER_FORMAT, Record, text_field
from t2g.types import Prompt

ROLES = ("system", "user", "assistant")
INSTRUCTIONS = (
    "You review a response to a prompt. Judge its accuracy, relevance, clarity and completeness. Say in a short "
    "critique what is good and what is poor, then quote the few short pieces of the response that the critique "
    "praises (good) and blames (poor). " + ANSWER_FORMAT
)


class PromptsTask:
    """A record has `prompt` (text) or `messages`; with both, `prompt` counts. `reference` and all else are payload."""

    name = "prompts"
    can_cut = False
    score_name = ""

    def prompt_id(self, record: Record) -> str | None:
        """Field `prompt_id` or `id`."""
        return next((str(record[field]) for field in ("prompt_id", "id") if record.get(field) is not None), None)

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        return self._messages(record)

    def prompt_text(self, record: Record) -> str:
        """One user message as it is; a conversation with a role before each message."""
        messages = self._messages(record)
        if len(messages) == 1:
            return messages[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def payload(self, record: Record) -> dict[str, Any]:
        return {key: value for key, value in record.items() if key not in ("prompt_id", "prompt", "messages")}

    def reference(self, record: Record) -> str | None:
        return text_field(record, "reference") if record.get("reference") is not None else None

    def feedback_messages(self, prompt: Prompt, response_text: str, input_limit: int | None = None) -> list[Message]:
        content = f"{INSTRUCTIONS}\n\nPrompt:\n{prompt.prompt_text[:input_limit]}\n\nResponse:\n{response_text}"
        return [{"role": "user", "content": content}]

    def measure(self, prompt: Prompt, response_text: str) -> dict[str, float] | None:
        return None

    def _messages(self, record: Record) -> list[Message]:
        if record.get("prompt") is not None or record.get("messages") is None:
            return [{"role": "user", "content": text_field(record, "prompt", "messages")}]
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError("field messages is no list of {role, content}")
        for i, message in enumerate(messages):
            fine = isinstance(message, dict) and isinstance(message.get("content"), str)
            if not fine or message.get("role") not in ROLES:
                raise ValueError(f"messages[{i}] needs a role, one of {', '.join(ROLES)}, and a content that is text")
        if messages[-1]["role"] != "user":
            raise ValueError(f"the last of messages is by {messages[-1]['role']}; the policy answers a user")
        return [{"role": message["role"], "content": message["content"]} for message in messages]
