import json
from pathlib import Path
from typing import Any

import pytest
from models import random_model
from transformers import AutoTokenizer

from t2g.feedback.examples import encode_target
from t2g.tasks.tiny.assets import END, PAD
from t2g.text.ends import find_end_ids, find_target_end, find_turn_end


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_model(tmp_path)


def change_json(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | fields))


def load_gemma_like(folder: Path) -> Any:
    """A tokenizer whose EOS is not the token with which the chat template ends a turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = PAD
    return tokenizer


def test_ends_are_the_union_of_all_places(folder: Path) -> None:
    """`config.json` alone lists 7, `generation_config.json` alone 9, the template alone ends a turn with <|end|>."""
    tokenizer = load_gemma_like(folder)
    change_json(folder / "config.json", eos_token_id=[1, 7])
    change_json(folder / "generation_config.json", eos_token_id=[1, 9])
    turn_end = tokenizer.convert_tokens_to_ids(END)
    assert find_end_ids(tokenizer, str(folder)) == sorted({tokenizer.eos_token_id, turn_end, 1, 7, 9})


@pytest.mark.parametrize("eos", [9, [9]])
def test_a_generation_config_that_transformers_refuses_has_ends_too(eos: Any, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    change_json(folder / "generation_config.json", temperature=-1, do_sample=True, eos_token_id=eos)
    assert {9, tokenizer.eos_token_id} <= set(find_end_ids(tokenizer, str(folder)))


def test_a_generation_config_is_optional(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (folder / "generation_config.json").unlink()
    assert find_end_ids(tokenizer, str(folder)) == [tokenizer.eos_token_id]


def test_a_target_ends_as_the_template_ends_a_turn(folder: Path) -> None:
    tokenizer = load_gemma_like(folder)
    assert tokenizer.convert_ids_to_tokens(int(encode_target("hé", tokenizer)[-1])) == END
    assert tokenizer.eos_token == PAD


@pytest.mark.parametrize(
    ("ending", "token"),
    [
        ("<|end|>\n", END),
        (" <|end|><|pad|>", END),  # Llama 2 writes a blank, Phi 3 a second token
        (" \n<|pad|>", PAD),
        ("", None),
        ("\n### ", None),
        ("text<|end|>", None),
    ],
)
def test_turn_ends_of_templates(ending: str, token: str | None, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + ending + "{% endfor %}"
    end = find_turn_end(tokenizer)
    assert end == (None if token is None else tokenizer.convert_tokens_to_ids(token))
    assert find_target_end(tokenizer) == (tokenizer.eos_token_id if end is None else end)


@pytest.mark.parametrize("template", [None, "{{ raise_exception('only one turn') }}", "{{ messages[0].content }}"])
def test_without_a_turn_end_a_target_ends_with_eos(template: str | None, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    assert find_turn_end(tokenizer) is None
    assert find_target_end(tokenizer) == tokenizer.eos_token_id
