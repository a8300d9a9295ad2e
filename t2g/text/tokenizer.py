"""Messages to token ids with the tokenizer's own chat template; texts from outside cannot forge its control tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from t2g.errors import MissingLocally, UserError

Message = dict[str, str]  # role: system, user or assistant; content
CONFIG_FILE = "config.json"
HUB_TIMEOUT_S = 5.0
Check = Callable[[], bool]


def check_model(key: str, model: str, revision: str | None = None) -> None:
    """UserError, naming `key`, for what is neither a model's folder nor in the hub's cache, unless the hub knows the
    name: it is asked once, where the libraries would try for a minute.
    """
    from huggingface_hub import try_to_load_from_cache

    if Path(model).is_dir():
        if not (Path(model) / CONFIG_FILE).is_file():
            raise UserError(f"{key}={model}: this folder holds no model, there is no {CONFIG_FILE} in it")
        return
    check_hub(
        key, model, revision, "model", lambda: bool(try_to_load_from_cache(model, CONFIG_FILE, revision=revision))
    )


def check_hub(key: str, name: str, revision: str | None, kind: Literal["model", "dataset"], cached: Check) -> None:
    """MissingLocally, naming `key`, unless the name is `cached` or the hub knows it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    nowhere = f"{key}={name}: there is no folder of that name"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # a name on the hub is `name` or `owner/name`
        raise MissingLocally(nowhere)
    if cached():
        return
    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise MissingLocally(f"{nowhere}, and the hub knows no such {kind}, or shows it to others only") from error
    except Exception as error:  # whatever its HTTP library raises
        raise MissingLocally(f"{nowhere}, nor in the hub's cache, and the hub cannot be asked: {error}") from error


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """The tokenizer of a model folder or hub name. UserError in a sentence when there is none; no code is trusted."""
    from transformers import AutoTokenizer

    if Path(model).is_dir():
        revision = None
    else:
        check_model("model", model, revision)
    try:
        return AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        fetch = "" if Path(model).is_dir() else f"; where there is a network: hf download {model}"
        raise UserError(f"no tokenizer can be loaded from {model}: {reason}{fetch}") from error


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` and of the header that asks for the assistant's answer.

    Text inside a message that spells a special token ("<|eot_id|>", "<s>") gets a space after its first character, so
    that a post or a sampled response can neither end its own turn nor open another. Special is what the vocabulary
    marks so, whether it has a role or none, as Llama 3's "<|start_header_id|>".
    Raises UserError when the tokenizer has no chat template or its template refuses the messages.
    """
    from jinja2 import TemplateError

    check_chat_template(tokenizer)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    longer = sorted(token for token in special | set(tokenizer.all_special_tokens) if len(token) > 1)

    def defused(text: str) -> str:
        for token in longer:  # in one order, so that a text with several of them always becomes the same text
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    safe = [{**message, "content": defused(message["content"])} for message in messages]
    try:
        text = tokenizer.apply_chat_template(safe, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the tokenizer's chat template refuses messages by {roles}: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template wrote BOS where it belongs


def check_chat_template(tokenizer: Any) -> None:
    """UserError when the tokenizer has no chat template: guessing one trains the model on a format it never saw."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"tokenizer {name} has no chat template; use an instruct model, or put a chat_template.jinja in its folder"
        )


def fit_chat(
    build: Callable[[int | None], Sequence[Message]], tokenizer: Any, max_tokens: int, *, input_chars: int
) -> np.ndarray | None:
    """The chat of at most `max_tokens` tokens that keeps most of its input text, [P] int32, or None if none fits.

    `build(limit)` gives the messages with the input text cut to its first `limit` characters, None for all of them;
    the input text has `input_chars`.
    """
    ids = encode_chat(tokenizer, build(None))
    if len(ids) <= max_tokens:
        return np.asarray(ids, np.int32)
    best: list[int] | None = None
    low, high = 0, input_chars - 1  # the longest limit that fits lies in [low, high], if there is one
    while low <= high:
        limit = (low + high) // 2
        ids = encode_chat(tokenizer, build(limit))
        if len(ids) <= max_tokens:
            best, low = ids, limit + 1
        else:
            high = limit - 1
    return None if best is None else np.asarray(best, np.int32)
