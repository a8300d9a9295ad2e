"""What a reward fleet keeps and how an answer is begun; the fleet itself is in tests/integration."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.reward import begin_answer
from t2g.feedback.examples import encode_target
from t2g.feedback.parse import Quote, format_answer, format_answer_prefix
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.text.offsets import decode


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A full stop and what ends a critique are one token, and so are the bytes of an emoji with their neighbors."""
    pieces = ['."', '.", "good": ["', "wrong", "It is ", "😀!"] * 9
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), pieces, vocab_size=400)


def test_the_end_of_a_critique_is_left_to_the_model(tokenizer: Any) -> None:
    ids, text = begin_answer(format_answer_prefix("It is wrong."), tokenizer)
    assert text == decode(tokenizer, ids) == '{"critique": "It is wrong'
    trained = encode_target(format_answer("It is wrong.", [Quote(quote="a")], []), tokenizer)
    assert trained[: len(ids)].tolist() == ids.tolist()
    assert decode(tokenizer, trained[len(ids) : len(ids) + 1]) == '.", "good": ["'


@settings(deadline=None)
@given(critique=st.text('It is wrong.😀é"\\\n', max_size=12) | st.text(max_size=6))
def test_an_answer_begins_with_whole_characters(tokenizer: Any, critique: str) -> None:
    begun = format_answer_prefix(critique)
    ids, text = begin_answer(begun, tokenizer)
    assert begun.startswith(text) and text == decode(tokenizer, ids)
    assert len(text) >= len('{"critique": ') or not ids.size
