"""Encode messages with the tokenizer's own chat template; message texts cannot forge its control tokens."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from t2g.errors import MissingLocally, UserError
from t2g.text.model_config import malformed_config_errors
from t2g.text.model_limits import check_vocabulary

Message = dict[str, str]  # role: system, user or assistant; content
CONFIG_FILE = "config.json"
HUB_TIMEOUT_S = 5.0


def check_model(key: str, model: str, revision: str | None = None) -> None:
    """Check that `model` is a model's folder, in the hub's cache, or on the hub.

    The hub gets one request; the libraries would retry for a minute.

    Raises:
        UserError: The model of `key` does not exist.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = Path(model)
    if folder.is_dir():
        if not (folder / CONFIG_FILE).is_file():
            raise UserError(f"{key}={model}: this folder holds no model, there is no {CONFIG_FILE} in it")
        return

    def is_cached() -> bool:
        return bool(try_to_load_from_cache(model, CONFIG_FILE, revision=revision))

    check_hub(key, model, revision, "model", is_cached)


def check_hub(
    key: str, name: str, revision: str | None, kind: Literal["model", "dataset"], is_cached: Callable[[], bool]
) -> None:
    """Check that a name is in the hub's cache or on the hub.

    Raises:
        MissingLocally: It is neither, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    not_found = f"{key}={name}: there is no folder of that name"
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1  # a name on the hub is `name` or `owner/name`
    if is_path:
        raise MissingLocally(not_found)
    if is_cached():
        return
    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=HUB_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise MissingLocally(f"{not_found}, and the hub knows no such {kind}, or shows it to others only") from error
    except Exception as error:  # any error of its HTTP library
        raise MissingLocally(f"{not_found}, nor in the hub's cache, and the hub cannot be reached: {error}") from error


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """Load the tokenizer of a model folder or hub name, without remote code.

    Raises:
        UserError: There is no tokenizer, it cannot be loaded, the model has no row for one of its tokens, or its chats
            begin with two BOS tokens.
    """
    from transformers import AutoTokenizer

    if Path(model).is_dir():
        revision = None
    else:
        check_model("model", model, revision)
    try:
        # Not Mistral's own backend, which a tekken.json selects: it has no chat template and no offsets of tokens.
        tokenizer = AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=False, mistral_format=False
        )
    except (OSError, ValueError, *malformed_config_errors()) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        fetch = "" if Path(model).is_dir() else f"; where there is a network: hf download {model}"
        raise UserError(f"no tokenizer can be loaded from {model}: {reason}{fetch}") from error
    check_vocabulary(tokenizer, model, revision)
    check_bos(tokenizer, model)
    return tokenizer


def check_bos(tokenizer: Any, model: str) -> None:
    """Check that a chat begins with one BOS token at most; nothing is checked for a template that refuses the chat.

    Raises:
        UserError: The chat template writes BOS twice, or the tokenizer adds one to that of the template.
    """
    if tokenizer.bos_token_id is None or not getattr(tokenizer, "chat_template", None):
        return
    try:
        ids = encode_chat(tokenizer, [{"role": "user", "content": "Hello"}])
    except UserError:
        return
    bos = tokenizer.bos_token_id
    if ids[:2] == [bos, bos]:
        raise UserError(
            f"chats of {model} begin with two BOS tokens ({tokenizer.bos_token!r}, id {bos}), and models are trained "
            "with one: remove it from its chat template (chat_template.jinja or tokenizer_config.json)"
        )


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of `messages` and of the generation prompt, see `chat_renderer`."""
    render = chat_renderer(tokenizer)
    (ids,) = encode_texts(tokenizer, [render(messages)])
    return list(ids)


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of chats as text; a fast tokenizer divides them among the cores."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has added BOS
    tokenizer("", add_special_tokens=False)  # resets truncation, padding and split_special_tokens of earlier calls
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def chat_renderer(tokenizer: Any) -> Callable[[Sequence[Message]], str]:
    """Return the function that makes messages, and the generation prompt, one text by the chat template.

    A special token in a message's text ("<|eot_id|>", "<s>") gets a space after its first character: a post or a
    sampled response can neither end its message nor start another. The vocabulary decides which tokens are special,
    with or without a role, such as Llama 3's "<|start_header_id|>".

    Raises:
        UserError: The tokenizer has no chat template; or, by the function, its template refuses the messages.
    """
    from jinja2 import TemplateError

    check_chat_template(tokenizer)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    longer = sorted(token for token in special if len(token) > 1)
    pattern = "|".join(map(re.escape, longer)) or "(?!)"
    find_any = re.compile(pattern).search

    def escape(text: str) -> str:
        if find_any(text) is None:
            return text
        for token in longer:  # a fixed order gives a text with several tokens the same result every time
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def render(messages: Sequence[Message]) -> str:
        escaped = [{**message, "content": escape(message["content"])} for message in messages]
        try:
            return tokenizer.apply_chat_template(escaped, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the tokenizer's chat template refuses messages by {roles}: {error}") from error

    return render


def check_chat_template(tokenizer: Any) -> None:
    """Raise UserError for a tokenizer without a chat template: a guessed one would be a format unknown to the model."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"tokenizer {name} has no chat template; use an instruct model, or put a chat_template.jinja in its folder"
        )


def fit_chat(
    build: Callable[[int | None], Sequence[Message]], tokenizer: Any, max_tokens: int, *, input_chars: int
) -> np.ndarray | None:
    """Return the ids [P] int32 of the chat with as much input text as fits into `max_tokens`, or None if none fits.

    Args:
        build: Returns the messages with the input text cut to its first `limit` characters; None keeps all.
        input_chars: The number of characters of the input text.
    """
    ids = encode_chat(tokenizer, build(None))
    if len(ids) <= max_tokens:
        return np.asarray(ids, np.int32)

    best: list[int] | None = None
    # The longest limit that fits lies in [low, high], if there is one.
    low = 0
    high = input_chars - 1
    while low <= high:
        limit = (low + high) // 2
        ids = encode_chat(tokenizer, build(limit))
        if len(ids) <= max_tokens:
            best = ids
            low = limit + 1
        else:
            high = limit - 1
    if best is None:
        return None
    return np.asarray(best, np.int32)
