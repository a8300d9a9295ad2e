"""Where an answer begins: thinking opened by the response or by the prompt, switched off, cut, and tags as text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thinking import CLOSE, OPEN, QWEN3_LIKE, R1_LIKE, build_thinking_tokenizer

from t2g.config import ModelConfig
from t2g.text.offsets import decode, token_offsets
from t2g.text.policy_chat import set_template_defaults
from t2g.text.thinking import find_answer_start, find_last_tag, find_thinking_tags
from t2g.text.tokenizer import encode_chat
from t2g.text.transcript import compute_answer_mask
from t2g.types import Rollout

TAGS = (OPEN, CLOSE)
CHAT = [{"role": "user", "content": "why <think>"}]  # the user's tag opens nothing


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_thinking_tokenizer(tmp_path_factory.mktemp("tokenizer"), special=request.param)


def encode(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def split(tokenizer: Any, mode: str, response: str, tags: Any = TAGS) -> str | None:
    """Return the answer to a prompt of a template: on and off as Qwen3's, open as DeepSeek R1's."""
    tokenizer.chat_template = R1_LIKE if mode == "open" else QWEN3_LIKE
    options = {"enable_thinking": False} if mode == "off" else None
    set_template_defaults(tokenizer, ModelConfig(policy="p", chat_template_kwargs=options))
    ids = encode(tokenizer, response)
    text = decode(tokenizer, ids)
    start = find_answer_start(tokenizer, np.array(encode_chat(tokenizer, CHAT)), ids, text, tags)
    return None if start is None else text[start:]


@pytest.mark.parametrize(
    ("mode", "response", "answer"),
    [
        ("on", "<think>\nHm.\n</think>\n\nYes.", "Yes."),
        ("on", "\n <think>Hm.</think>  Yes.\n", "  Yes.\n"),  # line ends alone are left out
        ("on", "<think>a</think>\r\n\n\nb\n\nc", "b\n\nc"),
        ("on", "<think></think>", ""),
        ("on", "<think>Hm.", None),
        ("on", "<think>", None),
        ("on", "Yes.", "Yes."),
        ("on", "", ""),
        ("open", "Hm.</think>\n\nYes.", "Yes."),
        ("open", "<think>Hm.</think>Yes.", "Yes."),
        ("open", "Hm.", None),
        ("open", "", None),
        ("off", "Yes.", "Yes."),
        ("off", "<think>Hm.</think>Yes.", "Yes."),  # it thinks though the prompt has closed it
        ("off", "<think>Hm.", None),
    ],
)
def test_the_answer_follows_the_first_closing_tag_of_an_open_thinking(
    tokenizer: Any, mode: str, response: str, answer: str | None
) -> None:
    assert split(tokenizer, mode, response) == answer


@pytest.mark.parametrize(
    ("mode", "response", "answer"),
    [
        ("on", "Yes <think>no</think> maybe", "Yes <think>no</think> maybe"),  # begins without a tag: it does not think
        ("on", "Hm.</think>Yes.", "Hm.</think>Yes."),
        ("on", "<think>a</think>b</think><think>c", "b</think><think>c"),
        ("off", "a</think>b", "a</think>b"),
    ],
)
def test_other_tags_are_text(tokenizer: Any, mode: str, response: str, answer: str) -> None:
    special = OPEN in tokenizer.all_special_tokens or not decode(tokenizer, encode(tokenizer, OPEN))
    expected = answer.replace(OPEN, "").replace(CLOSE, "") if special else answer  # special tokens have no text
    assert split(tokenizer, mode, response) == expected


def test_tags_of_several_tokens_are_found_in_the_text(tmp_path: Path) -> None:
    tokenizer = build_thinking_tokenizer(tmp_path)
    tags = ("<reason>", "</reason>")
    assert find_thinking_tags(tokenizer, tags) == tags
    assert split(tokenizer, "on", "<reason>Hm</reason>\nYes", tags) == "Yes"
    assert split(tokenizer, "on", "<reason>Hm <think></think>", tags) is None
    tail = encode(tokenizer, "x " * 40 + "<reason>\n")
    assert find_last_tag(tokenizer, tail, tags) == "<reason>"
    assert find_last_tag(tokenizer, tail[:-3], tags) is None


def test_tags_are_found_among_the_added_tokens(tokenizer: Any, tmp_path: Path) -> None:
    from t2g.tasks.tiny.assets import build_tokenizer

    assert find_thinking_tags(tokenizer) == TAGS
    assert find_thinking_tags(tokenizer, ()) is None
    plain = build_tokenizer(tmp_path, ["<think></think>"], vocab_size=300)
    assert find_thinking_tags(plain) is None
    assert find_answer_start(plain, encode(plain, OPEN), encode(plain, "a"), "a", None) == 0


def test_thinking_tokens_are_those_before_the_answer(tmp_path: Path) -> None:
    tokenizer = build_thinking_tokenizer(tmp_path)

    def count_thinking(ids: np.ndarray, start: int | None, offsets: np.ndarray | None = None) -> int:
        rollout = Rollout(
            prompt_id="p", sample_index=0, prompt_ids=ids, response_ids=ids, rollout_logprobs=np.zeros(len(ids)),
            response_text=decode(tokenizer, ids), finish_reason="stop", policy_versions=(), answer_start=start,
        )  # fmt: skip
        mask = compute_answer_mask(token_offsets(tokenizer, ids) if offsets is None else offsets, rollout)
        count = int((~mask).sum())
        assert mask[count:].all(), "the thinking comes first"
        return count

    ids = np.append(encode(tokenizer, "<think>q</think>\n\nz"), tokenizer.eos_token_id)
    assert decode(tokenizer, ids[: count_thinking(ids, len("<think>q</think>\n\n"))]) == "<think>q</think>\n\n"
    assert count_thinking(ids, None) == len(ids)
    assert count_thinking(ids, 0) == 0
    empty = np.append(encode(tokenizer, "<think></think>"), tokenizer.eos_token_id)
    assert count_thinking(empty, len("<think></think>")) == 2  # EOS is the answer
    straddling = np.array([[0, 4], [4, 9], [9, 9]])
    assert count_thinking(ids[:3], 6, straddling) == 1  # a token with a character of the answer belongs to it
