"""UltraFeedback: open questions, in the formats of the hub (ultrafeedback_binarized) and of the paper's authors.

Fields: prompt_id; prompt; response, a text or a conversation of {role, content} that ends with it; critique (of that
response); on the hub `chosen`, also a conversation, is both the response and the reference.
"""

from collections.abc import Mapping
from typing import Any

from t2g.tasks.base import Record
from t2g.tasks.prompts_only import PromptsTask, get_answer
from t2g.text.tokenizer import Message


class QATask(PromptsTask):
    name = "qa"

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        *history, last = self._messages(record)
        return [*history, {**last, "content": last["content"][:input_limit]}]

    def reference(self, record: Record) -> str | None:
        if record.get("reference") is None and record.get("chosen") is not None:
            return get_answer(record, "chosen")
        return super().reference(record)

    def response(self, record: Record) -> str | None:
        for field in ("response", "chosen"):
            if record.get(field) is not None:
                return get_answer(record, field)
        return None

    def own_notes(self, payload: Mapping[str, Any]) -> str | None:
        critique = payload.get("critique")
        if not isinstance(critique, str) or not critique.strip():
            return None
        return f"A critique of this response that was published with it:\n{critique}"

    def _messages(self, record: Record) -> list[Message]:
        turns = _find_turns(record)
        if turns is None:
            return super()._messages(record)
        return super()._messages({"messages": turns, "system": record.get("system")})

    def is_chat(self, record: Record) -> bool:
        return super().is_chat(record) or _find_turns(record) is not None


def _find_turns(record: Record) -> list[Any] | None:
    """Return all turns before a response that is a conversation: the last question alone would lose its context.

    None if the record's own prompt is all of them.
    """
    response = record.get("chosen") if record.get("response") is None else record["response"]
    if not isinstance(response, list) or len(response) < 2:
        return None
    has_prompt = record.get("prompt") is not None or record.get("messages") is not None
    if has_prompt and len(response) == 2:
        return None
    return response[:-1]
