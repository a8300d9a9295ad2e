"""Write a trained model as a folder for others: weights, tokenizer, model card, and no folder of this machine."""

import json
import shutil
from pathlib import Path
from typing import Any

from t2g.config import Dtype, loading
from t2g.config.evaluation import ADAPTER_FILE
from t2g.config.jobs import MODEL
from t2g.config.run_values import POLICY, find_model
from t2g.errors import UserError
from t2g.files import write_atomic
from t2g.runs.contents import MODEL_FILES, NOTES

CARD = "README.md"
ADAPTER_FOLDER = "adapter"  # in the folder of a policy that was trained with LoRA
ORIGINS = ("_name_or_path", "name_or_path")  # keys in which libraries keep where they have loaded something from
BASE = "base_model_name_or_path"  # key in the config of an adapter
PLAIN_CARD = """---
library_name: transformers
tags: [text2grad, t2g]
---
# {name}

This model was trained by t2g. Its output was not evaluated for harm, bias or facts.
"""


def find_published(source: Path, *, adapter: bool) -> Path:
    """Return the folder of the model or adapter that `source` names: a run, a model, or an adapter.

    Args:
        adapter: Return the adapter of a model that was trained with LoRA.

    Raises:
        UserError: There is no such model.
    """
    model = source
    if (source / loading.FILE_NAME).is_file():
        model = find_model(source, POLICY, MODEL)
    if is_adapter(model):
        return model
    if adapter and is_adapter(model / ADAPTER_FOLDER):
        return model / ADAPTER_FOLDER
    if adapter:
        raise UserError(f"{model}: it has no adapter, which learner.lora or sft.lora train; leave out --adapter")
    if not (model / "config.json").is_file():
        raise UserError(f"{source}: it is no run, model or adapter; name the folder of a run, such as runs/my-run")
    return model


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_FILE).is_file()


def read_base(folder: Path) -> str:
    """Return the model of an adapter, a folder or a hub name."""
    values = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
    return str(values.get(BASE))


def write_published(source: Path, target: Path, *, adapter: bool = False, base: str | None = None) -> Path:
    """Write the model of `source` into `target`: merged, unless `adapter`. The folder appears when it is complete.

    Args:
        source, adapter: See `find_published`.
        base: Name of an adapter's base model for others, in place of the folder of this machine.

    Raises:
        UserError: There is no such model, the base of an adapter cannot be loaded, or `target` holds something.
    """
    folder = find_published(source, adapter=adapter)
    if not target.name:
        raise UserError(f"{target} is the current folder; name a new one")
    if not any(file.suffix == ".safetensors" for file in folder.iterdir()):
        raise UserError(f"{folder} has no weights in safetensors: write them by save_pretrained of transformers")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not an empty folder; name another one")
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    if is_adapter(folder) and not adapter:
        _merge(folder, part)
    else:
        part.mkdir(parents=True)
        for file in list_published(folder):
            shutil.copyfile(file, part / file.name)
    _remove_origins(part, base)
    card = make_card(folder, name=target.name, adapter=adapter, base=base)
    write_atomic(part / CARD, card.encode())
    part.rename(target)
    return target


def list_published(folder: Path) -> list[Path]:
    """Return the files of a model, without what t2g notes about it."""
    files = [file for file in folder.iterdir() if file.suffix in MODEL_FILES and file.name not in NOTES]
    return sorted(files)


def make_card(folder: Path, *, name: str, adapter: bool, base: str | None) -> str:
    """Return the model card of a model, or of an adapter.

    Args:
        folder: The model or adapter that is written.
        name: Title of a card that is missing.
        adapter: An adapter is written as it is; if false, merged into its base.
        base: See `write_published`.
    """
    if not is_adapter(folder):
        return _read_card(folder) or PLAIN_CARD.format(name=name)
    card = _read_card(folder)
    if card is None or read_base(folder) in card:  # peft has made it, with the base's folder on this machine
        card = _read_card(folder.parent) or PLAIN_CARD.format(name=name)
    if not adapter:
        return card.replace("library_name: peft", "library_name: transformers", 1)
    card = card.replace("library_name: transformers", "library_name: peft", 1)
    if base is not None and "\nbase_model:" not in card:
        card = card.replace("---\n", f"---\nbase_model: {json.dumps(base)}\n", 1)
    return card


def _read_card(folder: Path) -> str | None:
    card = folder / CARD
    return card.read_text(encoding="utf-8") if card.is_file() else None


def _merge(folder: Path, target: Path) -> None:
    """Merge an adapter into its base, in the base's data type."""
    from actors.learner.lora import merge_adapter
    from t2g.text.model_config import load_local_config

    base = load_local_config(read_base(folder))
    stored_type = str(getattr(base, "dtype", None)).removeprefix("torch.")
    dtype: Dtype = "bfloat16" if stored_type == "bfloat16" else "float32"
    merge_adapter(folder, target, dtype)


def _remove_origins(folder: Path, base: str | None) -> None:
    """Remove the folders of this machine from the JSON files."""
    for file in folder.glob("*.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            continue
        published = _without_origins(values)
        if base is not None and file.name == ADAPTER_FILE:
            published[BASE] = base
        if published != values:
            write_atomic(file, json.dumps(published, indent=2).encode())


def _without_origins(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in ORIGINS}
