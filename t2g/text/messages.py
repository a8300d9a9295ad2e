"""Read the messages of chats, logs and fine-tuning files: names of roles, and contents in parts."""

from collections.abc import Mapping
from typing import Any, NamedTuple

ROLES = {  # names of OpenAI, ShareGPT, Llama and Gemma, in lower case -> ours
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "model": "assistant",
    "function_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip

CONVERSATION_FIELDS = ("messages", "conversations", "conversation")  # fields of a record that may hold the messages


class ContentText(NamedTuple):
    """The text of a content, and whether it is all of it."""

    text: str
    is_complete: bool  # False: a part is no text


def get_role(message: Mapping[str, Any]) -> str | None:
    """Return our name of a message's role (system, user, assistant, tool), None for an unknown one."""
    name = message.get("role")
    if name is None:
        name = message.get("from")
    return ROLES.get(str(name).lower())


def get_content(message: Mapping[str, Any]) -> Any:
    """Return the content of a message of OpenAI's or ShareGPT's form."""
    content = message.get("content")
    if content is None:
        return message.get("value")
    return content


def read_content(content: Any) -> ContentText:
    """Return the text of a content: a text, or a list of texts and parts with a text.

    >>> read_content([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])
    ContentText(text='a', is_complete=False)
    """
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
    is_complete = len(texts) == len(parts)
    return ContentText("".join(texts), is_complete)
