"""Check by its files that a model folder can be loaded: before engines and ranks start, and without reading weights."""

import json
import re
from pathlib import Path
from typing import Any

from t2g.errors import UserError
from t2g.files import is_lfs_pointer
from t2g.text.tokenizer import CONFIG_FILE

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
# Architectures without a language-modeling head. A causal model with their weights has a random one.
_HEADLESS = re.compile(
    r"(For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|MaskedLM)|(?<!Head)(?<!Heads)Model)$"
)


def check_model_files(key: str, model: str, *, is_trained: bool) -> None:
    """Check the architecture and the weight files of a local model folder; of a hub name nothing is read.

    Args:
        key: Config key of the model, for messages.

    Raises:
        UserError: Weights are missing; or a model that is trained is quantized, has no language-modeling head, or an
            architecture that transformers does not know.
    """
    folder = Path(model)
    if not folder.is_dir():
        return
    problem = _find_problem(folder, is_trained)
    if problem:
        raise UserError(f"{key}={model}: {problem}")


def _find_problem(folder: Path, is_trained: bool) -> str:
    """Return what is wrong with the folder, "" if nothing is."""
    config = _read_object(folder / CONFIG_FILE)
    problem = _find_weights_problem(folder, is_trained)
    if problem or not is_trained:
        return problem
    problem = _find_architecture_problem(config)
    if problem:
        return problem
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "its config names no method")
        return f"its weights are quantized ({method}); a policy is trained from weights that are not"
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and _HEADLESS.search(str(architectures[0])):
        return f"its weights are of {architectures[0]}, without a language-modeling head; give a causal language model"
    return ""


def _find_architecture_problem(config: dict[str, Any]) -> str:
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type in CONFIG_MAPPING:
        return ""
    if config.get("auto_map"):
        return f"its architecture {model_type} needs code of the model's own (auto_map), which is never run"
    return f"this version of transformers does not know its architecture {model_type}"


def _find_weights_problem(folder: Path, is_trained: bool) -> str:
    names = _list_weight_files(folder)
    if not is_trained and names == [WEIGHTS]:  # vLLM needs no index
        names = sorted(file.name for file in folder.glob("*.safetensors")) or names
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        others = ", ".join(sorted(file.name for file in folder.glob("*.bin")))
        advice = f"; there is {others}, and weights are read from safetensors only" if others else ""
        return f"{', '.join(missing)} is missing, or its link is broken{advice}"
    for name in names:
        if is_lfs_pointer(folder / name):
            return f"{name} is a pointer of Git LFS in place of weights: run `git lfs pull`, or download it"
    return ""


def _list_weight_files(folder: Path) -> list[str]:
    """Return the names of the files that the folder's index lists, without one the name of a single file."""
    weight_map = _read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return [WEIGHTS]
    return sorted(set(map(str, weight_map.values())))


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if it holds something else or is missing; others report that."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
