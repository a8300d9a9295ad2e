"""Folders that no engine or rank can load are refused by their files, and others are not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import random_model

from t2g.errors import UserError
from t2g.resources.model_files import check_model_files


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_model(folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def configure(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def break_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")


def lose_a_shard(folder: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors").rename(folder / names["a"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def lose_the_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def clone_without_lfs(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lose_weights, "model.safetensors is missing, or its link is broken; there is pytorch_model.bin"),
        (break_link, "model.safetensors is missing"),
        (lose_a_shard, "model-00002-of-00002.safetensors is missing"),
        (clone_without_lfs, "git lfs pull"),
    ],
)
def test_what_nothing_can_load(model: Path, change: Callable[[Path], None], words: str) -> None:
    change(model)
    for is_trained in (True, False):
        with pytest.raises(UserError, match=f"^model.policy={model}: ") as refused:
            check_model_files("model.policy", str(model), is_trained=is_trained)
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (configure(model_type="own", auto_map={"AutoConfig": "own.Config"}), "needs code of the model's own"),
        (configure(model_type="llama9"), "does not know its architecture llama9"),
        (configure(quantization_config={"quant_method": "awq"}), "quantized (awq)"),
        (configure(architectures=["LlamaForSequenceClassification"]), "without a language-modeling head"),
        (configure(architectures=["LlamaModel"]), "without a language-modeling head"),
        (lose_the_index, "model.safetensors is missing"),
    ],
)
def test_what_only_an_engine_can_load(model: Path, change: Callable[[Path], None], words: str) -> None:
    change(model)
    check_model_files("feedback.reward_model", str(model), is_trained=False)
    with pytest.raises(UserError) as refused:
        check_model_files("model.policy", str(model), is_trained=True)
    assert words in str(refused.value)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "GPT2DoubleHeadsModel", "Gemma3ForConditionalGeneration"])
def test_a_head_of_another_name_is_one(model: Path, architecture: str) -> None:
    configure(architectures=[architecture])(model)
    check_model_files("model.policy", str(model), is_trained=True)


@pytest.mark.parametrize("config", [{"architectures": {}}, {"model_type": []}, {"quantization_config": 3}])
def test_values_of_a_wrong_type_are_left_to_transformers(model: Path, config: dict[str, Any]) -> None:
    configure(**config)(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": null}')
    check_model_files("model.policy", str(model), is_trained=True)


def test_a_name_of_the_hub_is_not_read() -> None:
    check_model_files("model.policy", "owner/name", is_trained=True)
