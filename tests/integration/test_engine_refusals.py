"""Models that vLLM does not serve: one sentence, before any engine process starts."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import random_model

from actors.engines.engine import Engine
from t2g.config import EngineConfig
from t2g.errors import UserError


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def refuse(folder: Path, max_model_len: int = 64, kv_cache_gib: float = 0.1) -> str:
    config = EngineConfig(max_model_len=max_model_len, kv_cache_gib=kv_cache_gib)
    with pytest.raises(UserError) as caught:
        asyncio.run(Engine(str(folder), config, seed=1).start())
    return str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert str(tmp_path) in refuse(tmp_path)


def test_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    random_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["Nonesuch"], "model_type": "nonesuch"})
    )
    assert "nonesuch" in refuse(tmp_path).lower()


def test_an_architecture_that_vllm_does_not_serve(tmp_path: Path) -> None:
    random_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"architectures": ["VitsModel"], "model_type": "vits"}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert "VitsModel" in refuse(tmp_path)


def test_a_window_longer_than_the_models(tmp_path: Path) -> None:
    random_model(tmp_path)
    sentence = refuse(tmp_path, max_model_len=4096)
    assert "max_model_len (4096) is greater than the derived max_model_len (max_position_embeddings=2048" in sentence


def test_a_cache_smaller_than_one_sequence(tmp_path: Path) -> None:
    """2 layers, 2 heads of 32, keys and values in float32: 1 KiB a token, 2 blocks of at least 64 tokens."""
    random_model(tmp_path)
    sentence = refuse(tmp_path, kv_cache_gib=1e-4)
    assert re.fullmatch(
        r"kv_cache_gib is 0\.0001, and one sequence of \S+ with max_model_len=64 needs 0\.01 GiB: raise the one .*",
        sentence,
    )
