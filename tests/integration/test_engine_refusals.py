"""Models that vLLM does not serve: one sentence, before any engine process starts."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import random_model

from actors.engine import Engine
from t2g.config import EngineConfig
from t2g.errors import UserError


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def refuse(folder: Path, max_model_len: int = 64) -> str:
    with pytest.raises(UserError) as caught:
        asyncio.run(Engine(str(folder), EngineConfig(max_model_len=max_model_len), seed=1).start())
    return str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert refuse(tmp_path).startswith(f"vLLM cannot serve the model {tmp_path}: ")


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
    assert "max_model_len (4096) is greater than the derived max_model_len (max_position_embeddings=256" in refuse(
        tmp_path, max_model_len=4096
    )
