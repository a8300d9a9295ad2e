"""Token offsets against a slow oracle, and our decode against the tokenizer's own."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from t2g.errors import UserError
from t2g.feedback import decode, token_offsets
from t2g.text.offsets import _character_starts

IDS = st.lists(st.integers(0, 400), max_size=40)  # beyond every vocabulary of the fixtures, special tokens included


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Bytes of one token in the middle of a text, from the tokenizer's vocabulary by the slow road."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token is None or token_id in tokenizer.all_special_ids:
        return b""
    if token in tokenizer.get_added_vocab():
        return token.encode()
    decoder = str(tokenizer.backend_tokenizer.decoder)
    if "ByteLevel" in decoder:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return bytes(byte for character in token for byte, sign in bytes_to_unicode().items() if sign == character)
    if "ByteFallback" in decoder and len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def slow_offsets(tokenizer: Any, ids: list[int]) -> list[list[int]]:
    """The character of byte i is the last one of the text that ends with byte i, decoded anew for every byte."""
    pieces = [token_bytes(tokenizer, token_id) for token_id in ids]
    decoder = str(tokenizer.backend_tokenizer.decoder)
    first = next((i for i, piece in enumerate(pieces) if piece), None)
    if first is not None and "Strip" in decoder:
        pieces[first] = pieces[first].removeprefix(b" ")
    elif first is not None and decoder.startswith("Metaspace"):
        pieces[first] = pieces[first].replace(b" ", b"")
    data = b"".join(pieces)
    character = [len(data[: i + 1].decode("utf-8", errors="replace")) - 1 for i in range(len(data))]
    character.append(len(data.decode("utf-8", errors="replace")))
    offsets = []
    at = 0
    for piece in pieces:
        offsets.append([character[at], character[at + len(piece) - 1] + 1 if piece else character[at]])
        at += len(piece)
    return offsets


@given(
    data=st.lists(st.sampled_from([b"a", b"\xc3", b"\xa9", b"\xe2\x82", b"\xf0\x9f", b"\xff", "€".encode()])).map(
        b"".join
    )
)
def test_character_starts_agree_with_pythons_own_replacement(data: bytes) -> None:
    ends = [len(data[: i + 1].decode("utf-8", errors="replace")) for i in range(len(data))]
    expected = [end > begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert _character_starts(data).tolist() == expected


@pytest.mark.parametrize("invalid", [b"\xff", b"\xa9", b"a\xe2\x82"])
def test_invalid_bytes_take_time_in_proportion(invalid: bytes) -> None:
    """A decoding from each invalid byte on takes half a minute for this text."""
    data = invalid * (400_000 // len(invalid))
    started = time.process_time()
    starts = _character_starts(data)
    assert time.process_time() - started < 3
    assert starts.sum() == len(data.decode("utf-8", errors="replace"))


@given(ids=IDS)
def test_offsets_agree_with_the_oracle_for_any_ids(tokenizer: Any, ids: list[int]) -> None:
    offsets = token_offsets(tokenizer, np.asarray(ids, np.int32))
    assert offsets.dtype == np.int32
    assert offsets.shape == (len(ids), 2)
    assert offsets.tolist() == slow_offsets(tokenizer, ids)


@given(ids=IDS)
def test_offsets_are_in_order_and_cover_the_text(tokenizer: Any, ids: list[int]) -> None:
    text = decode(tokenizer, ids)
    offsets = token_offsets(tokenizer, ids)
    assert (np.diff(offsets[:, 0]) >= 0).all()
    assert (offsets[:, 0] <= offsets[:, 1]).all()
    assert set(range(len(text))) == {c for start, end in offsets.tolist() for c in range(start, end)}


@given(ids=IDS)
def test_decode_is_the_tokenizers_own_for_valid_text(tokenizer: Any, ids: list[int]) -> None:
    text = decode(tokenizer, ids)
    if "\ufffd" not in text:
        assert text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(text=st.text(max_size=40) | st.text("aé 東🎧\u0301\n the", max_size=40))
def test_any_text_comes_back(any_text_tokenizer: Any, text: str) -> None:
    tokenizer = any_text_tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert decode(tokenizer, ids) == expected
    assert token_offsets(tokenizer, ids).tolist() == slow_offsets(tokenizer, ids)


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    """One token for each byte."""
    if "ByteLevel" in str(tokenizer.backend_tokenizer.decoder):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return tokenizer.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in data])
    return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])


def test_tokens_of_one_character_share_its_range(any_text_tokenizer: Any) -> None:
    ids = [*byte_ids(any_text_tokenizer, "é🎧a".encode()), any_text_tokenizer.eos_token_id]
    assert decode(any_text_tokenizer, ids) == "é🎧a"
    assert token_offsets(any_text_tokenizer, ids).tolist() == [[0, 1]] * 2 + [[1, 2]] * 4 + [[2, 3], [3, 3]]


@pytest.mark.parametrize(
    ("data", "text", "offsets"),
    [
        (b"\xff\xfea", "\ufffd\ufffda", [[0, 1], [1, 2], [2, 3]]),
        (b"\xf0\x9f\x8e", "\ufffd", [[0, 1], [0, 1], [0, 1]]),  # an emoji cut by the length limit
        (b"\xe6\x9d!\xb1", "\ufffd!\ufffd", [[0, 1], [0, 1], [1, 2], [2, 3]]),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd", [[0, 1], [1, 2], [2, 3]]),  # a surrogate is no character
        ("\ufffd".encode(), "\ufffd", [[0, 1], [0, 1], [0, 1]]),  # the sign itself is valid
    ],
)
def test_bytes_that_are_no_text(any_text_tokenizer: Any, data: bytes, text: str, offsets: list[list[int]]) -> None:
    ids = byte_ids(any_text_tokenizer, data)
    assert decode(any_text_tokenizer, ids) == text == data.decode("utf-8", errors="replace")
    assert token_offsets(any_text_tokenizer, ids).tolist() == offsets


def test_special_and_unknown_tokens_have_an_empty_range(gpt2: Any) -> None:
    a = byte_ids(gpt2, b"a")[0]
    end = gpt2.eos_token_id
    assert token_offsets(gpt2, [end, a, end, 100_000, -1, a, end]).tolist() == [
        [0, 0], [0, 1], [1, 1], [1, 1], [1, 1], [1, 2], [2, 2]
    ]  # fmt: skip
    assert token_offsets(gpt2, []).shape == (0, 2)
    assert decode(gpt2, []) == ""


def test_a_special_token_inside_a_character_stands_at_its_start(gpt2: Any) -> None:
    first, second = byte_ids(gpt2, "é".encode())
    ids = [first, gpt2.eos_token_id, second]
    assert decode(gpt2, ids) == "é" == gpt2.decode(ids, skip_special_tokens=True)
    assert token_offsets(gpt2, ids).tolist() == [[0, 1], [0, 0], [0, 1]]


def test_added_tokens_that_are_not_special_are_text(any_text_tokenizer: Any) -> None:
    ids = any_text_tokenizer.convert_tokens_to_ids(["<think>", "two words"])
    assert decode(any_text_tokenizer, ids) == "<think>two words"
    assert token_offsets(any_text_tokenizer, ids).tolist() == [[0, 7], [7, 16]]


def test_llama_loses_one_space_at_the_start_only(llama: Any) -> None:
    ids = llama.convert_tokens_to_ids(["</s>", "▁", "▁", "a"])
    assert decode(llama, ids) == " a"
    assert token_offsets(llama, ids).tolist() == [[0, 0], [0, 0], [0, 1], [1, 2]]


def test_metaspace_decoder_bares_the_first_token(metaspace: Any) -> None:
    ids = metaspace.convert_tokens_to_ids(["▁the", "▁the"])
    assert metaspace.unk_token_id not in ids
    assert decode(metaspace, ids) == "the the"
    assert token_offsets(metaspace, ids).tolist() == [[0, 3], [3, 7]]


@pytest.mark.parametrize(
    ("decoder", "kinds"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Fuse(), "Fuse"),
        (decoders.Sequence([decoders.Replace("▁", "_"), decoders.Fuse()]), "Replace + Fuse"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Metaspace()]), "Strip + Metaspace"),
    ],
)
def test_other_tokenizers_are_refused_in_a_sentence(decoder: Any, kinds: str) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    with pytest.raises(UserError, match="decodes with") as error:
        token_offsets(tokenizer, [0])
    assert kinds in str(error.value)


def test_a_tokenizer_without_a_backend_is_refused() -> None:
    class Slow:
        name_or_path = "my/slow"

    with pytest.raises(UserError, match="my/slow has no fast backend"):
        decode(Slow(), [0])
