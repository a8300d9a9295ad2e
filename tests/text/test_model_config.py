"""A config.json with values that no model has."""

import json
from pathlib import Path
from typing import Any

import pytest
from models import random_model

from t2g.errors import UserError
from t2g.resources.model_shape import find_shape
from t2g.text.model_config import load_local_config
from t2g.text.tokenizer import load_tokenizer

MALFORMED = [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"num_hidden_layers": None}]


def write_config(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | changes))


@pytest.mark.parametrize("changes", MALFORMED)
def test_a_malformed_config_is_one_sentence_with_the_models_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    random_model(tmp_path)
    write_config(tmp_path, changes)
    for load in (load_local_config, find_shape, load_tokenizer):
        with pytest.raises(UserError) as caught:
            load(str(tmp_path))
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_no_files_and_an_unknown_architecture_have_no_config(tmp_path: Path) -> None:
    assert load_local_config(str(tmp_path)) is None
    random_model(tmp_path)
    write_config(tmp_path, {"architectures": ["Nonesuch"], "model_type": "nonesuch"})
    assert load_local_config(str(tmp_path)) is None
