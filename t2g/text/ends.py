"""The tokens that end a response or a target of supervised training."""

from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from t2g.errors import UserError

# A conversation to render by a chat template, to see what the template adds.
ANSWER = "t2g-dummy-answer"
CHAT = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER})


class _TurnEnd(NamedTuple):
    """The token with which a chat template ends a turn."""

    template: str
    token_id: int | None


_turn_ends: WeakKeyDictionary[Any, _TurnEnd] = WeakKeyDictionary()  # by tokenizer


def find_end_ids(tokenizer: Any, model: str, revision: str | None = None) -> list[int]:
    """Return the tokens that end a response, in order.

    They are the union of the tokenizer's EOS, the EOS in generation_config.json and in config.json of the model, and
    the token with which the chat template ends a turn. Gemma's template ends a turn with another token than its EOS;
    some models list ends in config.json alone.
    """
    from transformers import PreTrainedConfig

    ends = {tokenizer.eos_token_id, find_turn_end(tokenizer)}
    with suppress(OSError):  # the file is optional; transformers refuses some published ones, so it is read as JSON
        generation, _ = PreTrainedConfig.get_config_dict(
            model, _configuration_file="generation_config.json", revision=revision
        )
        ends |= _as_set(generation.get("eos_token_id"))
    config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    text_config = config.get("text_config") or {}  # a model that also reads images has this section
    ends |= _as_set(config.get("eos_token_id"))
    ends |= _as_set(text_config.get("eos_token_id"))
    return sorted(end for end in ends if end is not None)


def _as_set(eos: int | list[int] | None) -> set[int | None]:
    return set(eos) if isinstance(eos, list) else {eos}


def find_turn_end(tokenizer: Any) -> int | None:
    """Return the special token that the chat template writes after an answer; None if it writes none.

    >>> gemma.convert_ids_to_tokens(find_turn_end(gemma)), gemma.eos_token
    ('<end_of_turn>', '<eos>')
    """
    template = str(tokenizer.chat_template or "")
    known = _turn_ends.get(tokenizer)
    if known is not None and known.template == template:
        return known.token_id
    token_id = _read_turn_end(tokenizer) if template else None
    _turn_ends[tokenizer] = _TurnEnd(template, token_id)
    return token_id


def _read_turn_end(tokenizer: Any) -> int | None:
    try:
        text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 a template may raise anything; prompts of the run say so
        return None
    special: dict[str, int] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special[token.content] = token_id
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))

    _, _, after_answer = text.rpartition(ANSWER)
    after_answer = after_answer.lstrip()
    candidates = [token for token in special if token and after_answer.startswith(token)]
    if not candidates:
        return None
    longest = max(candidates, key=len)
    return special[longest]


def find_target_end(tokenizer: Any) -> int:
    """Return the token that ends a target: that of a turn in the chat template, else the tokenizer's EOS.

    Raises:
        UserError: There is neither.
    """
    turn_end = find_turn_end(tokenizer)
    if turn_end is not None:
        return turn_end
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token; a model trained without one never stops: set it in its folder")
    return int(tokenizer.eos_token_id)
