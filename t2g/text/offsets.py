"""Decode sampled token ids to text, and map each token to its characters, independently of the engine's text.

A token is a string of bytes. The concatenated bytes of all tokens are the response in UTF-8. A token's characters are
those that its bytes belong to. Two families of tokenizers are supported, recognized by their decoder: byte-level BPE
(GPT-2, Llama-3, Qwen) and SentencePiece style (Llama-2, Mistral, Gemma; byte fallback, metaspace).

    ids      "caf" | C3 | A9 | " bar" | <eos>       (the accented e is split into its two bytes)
    offsets  [0,3) | [3,4) | [3,4) | [4,8) | [8,8)
    decode   "café bar"
"""

import codecs
import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from t2g.errors import UserError

METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """Return the text of `ids`, without special tokens and ids outside the vocabulary.

    Invalid UTF-8 becomes U+FFFD, as with `bytes.decode(errors="replace")`. Valid text equals the tokenizer's own decode
    with skip_special_tokens and without clean-up.

    Raises:
        UserError: The tokenizer is of another family.
    """
    data = b"".join(_pieces(tokenizer, ids))
    return data.decode("utf-8", errors="replace")


def token_offsets(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the half-open character range of each token in `decode(tokenizer, ids)`, [R, 2] int32.

    Starts never decrease and the ranges cover the text. Tokens that hold bytes of one character share its range. A
    token without bytes (EOS, special, unknown id) has an empty range where the next character starts.

    Raises:
        UserError: The tokenizer is of another family.
    """
    pieces = _pieces(tokenizer, ids)
    data = b"".join(pieces)
    # character[i] is the character that byte i belongs to; the entry past the end is the length of the text
    starts = _character_starts(data)
    num_characters = starts.sum()
    character = np.append(np.cumsum(starts) - 1, num_characters).astype(np.int32)

    num_bytes = list(map(len, pieces))
    ends = np.cumsum(num_bytes, dtype=np.int64)
    begins = np.append(0, ends)[:-1]
    first = character[begins]
    after_last = character[ends - 1] + 1
    offsets = np.empty((len(pieces), 2), np.int32)
    offsets[:, 0] = first
    offsets[:, 1] = np.where(ends > begins, after_last, first)
    return offsets


def has_token(tokenizer: Any, ids: Iterable[int]) -> np.ndarray:
    """Return whether the tokenizer has a token for each id, [ids] bool; models have rows for more ids than that."""
    names = tokenizer.convert_ids_to_tokens([int(token_id) for token_id in ids])
    return np.array([name is not None for name in names], bool)


def _character_starts(data: bytes) -> np.ndarray:
    """Return for each byte whether a character of `data.decode(errors="replace")` starts there, [bytes] bool."""
    codes = np.frombuffer(data, np.uint8)
    is_continuation = (codes & 0xC0) == 0x80
    starts = ~is_continuation
    _invalid.ranges = []
    data.decode("utf-8", errors=RECORD_INVALID)
    for begin, end in _invalid.ranges:
        starts[begin:end] = False
        starts[begin] = True
    return starts


class _Invalid(threading.local):
    """Ranges of bytes that one decoding of this thread replaced by U+FFFD."""

    ranges: list[tuple[int, int]]


_invalid = _Invalid()


def _record_invalid(error: UnicodeError) -> tuple[str, int]:
    """Replace an invalid range by one U+FFFD, as errors="replace" does, and record it."""
    assert isinstance(error, UnicodeDecodeError)
    _invalid.ranges.append((error.start, error.end))
    return "\ufffd", error.end


RECORD_INVALID = "t2g.record_invalid"
codecs.register_error(RECORD_INVALID, _record_invalid)


# ------------------------------------------------------------------------------------------------------ bytes of tokens
@dataclass(frozen=True, kw_only=True)
class _Rules:
    """Rules by which a tokenizer's decoder turns tokens into text."""

    byte_level: bool  # every character of a token represents a byte (GPT-2's table); else metaspace and text
    byte_fallback: bool = False  # <0xE4> is one byte
    bare_first_token: bool = False  # metaspaces of the first token are removed
    strip_left: int = 0  # largest number of spaces that are removed at the start of the text


def _byte_table() -> dict[str, int]:
    """Return GPT-2's printable characters for the 256 bytes: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    unprintable = (byte for byte in range(256) if byte not in printable)
    for code, byte in enumerate(unprintable, start=0x100):
        table[chr(code)] = byte
    return table


_BYTE_OF_CHARACTER = _byte_table()


class _Vocabulary(dict[int, bytes]):
    """Bytes of every token of one tokenizer, looked up on first use.

    Holds the backend but not the tokenizer: the tokenizer is the weak key of the cache that holds this object.
    """

    def __init__(self, tokenizer: Any) -> None:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"tokenizer {name} has no fast backend (tokenizer.json) to read token bytes from")
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._rules = _read_rules(backend, name)
        self._added = {token_id: token.content for token_id, token in added.items()}
        special = (token_id for token_id, token in added.items() if token.special)
        self.update(dict.fromkeys((*tokenizer.all_special_ids, *special), b""))

    def pieces(self, ids: list[int]) -> list[bytes]:
        pieces = [self[token_id] for token_id in ids]
        if self._rules.bare_first_token:
            first = _find_first(pieces)
            if first is not None and ids[first] not in self._added:
                pieces[first] = pieces[first].replace(b" ", b"")
        for _ in range(self._rules.strip_left):
            first = _find_first(pieces)
            if first is None or not pieces[first].startswith(b" "):
                break
            pieces[first] = pieces[first][1:]
        return pieces

    def __missing__(self, token_id: int) -> bytes:
        return self.setdefault(token_id, self._read(token_id))

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        # Models round their vocabulary up: an id without a token can be sampled.
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._rules.byte_level:
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return token.encode()
        if self._rules.byte_fallback:
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte:
                return bytes.fromhex(byte[1])
        return token.replace(METASPACE, " ").encode()


def _find_first(pieces: list[bytes]) -> int | None:
    """Return the index of the first piece that is not empty."""
    for index, piece in enumerate(pieces):
        if piece:
            return index
    return None


def _read_rules(backend: Any, name: str) -> _Rules:
    """Return the rules of a backend's decoder.

    Raises:
        UserError: The decoder is of another family (WordPiece, CLIP, none).
    """
    decoder: dict[str, Any] = {"type": "none"}
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _Rules(byte_level=True)

    writes_spaces = "Replace" in kinds or "Metaspace" in kinds
    if writes_spaces and _are_supported(steps):
        return _read_metaspace_rules(steps)
    raise UserError(
        f"tokenizer {name} decodes with {' + '.join(kinds)}; "
        "t2g reads token bytes of byte-level BPE and of SentencePiece-style tokenizers only"
    )


def _read_metaspace_rules(steps: list[dict[str, Any]]) -> _Rules:
    byte_fallback = False
    bare_first_token = False
    strip_left = 0
    for step in steps:
        match step["type"]:
            case "ByteFallback":
                byte_fallback = True
            case "Metaspace" if step["prepend_scheme"] != "never":
                bare_first_token = True
            case "Strip":
                strip_left += step["start"]
    return _Rules(
        byte_level=False,
        byte_fallback=byte_fallback,
        bare_first_token=bare_first_token,
        strip_left=strip_left,
    )


def _are_supported(steps: list[dict[str, Any]]) -> bool:
    fused = False
    for step in steps:
        if not _is_supported_step(step, fused=fused):
            return False
        if step["type"] == "Fuse":
            fused = True
    return True


def _is_supported_step(step: dict[str, Any], *, fused: bool) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return (pattern, content) == (METASPACE, " ")
        case {"type": "Metaspace", "replacement": replacement}:
            return replacement == METASPACE
        case {"type": "Strip", "content": content, "stop": stop}:
            return (content, stop, fused) == (" ", 0, True)
    return step["type"] in ("ByteFallback", "Fuse")


def _pieces(tokenizer: Any, ids: Iterable[int]) -> list[bytes]:
    """Return the bytes that each token adds to the text."""
    vocabulary = _VOCABULARIES.get(tokenizer)
    if vocabulary is None:
        vocabulary = _Vocabulary(tokenizer)
        _VOCABULARIES[tokenizer] = vocabulary
    return vocabulary.pieces(list(map(int, ids)))


_VOCABULARIES: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()
