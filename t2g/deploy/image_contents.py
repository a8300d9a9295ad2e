"""Warn of files and modules that a config names and t2g's image lacks. Another image may have them."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t2g.config import JobConfig
from t2g.deploy.manifests import HOME
from t2g.runs.contents import OWN_PACKAGES

CONFIGS = "configs"  # the only folder of config files in the image
CODE_FIELDS = ("task", "environment", "source", "align")  # fields that may hold an import path
IMPORT_PATH = re.compile(r"(?!metric:)([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*")


def image_warnings(config: JobConfig, config_path: Path) -> Iterator[str]:
    """Yield a warning for the config file, each tracker, the mirror, and each function or class that the image lacks.

    Args:
        config_path: Relative to the working directory of the image, or absolute on the volume.
    """
    if not config_path.is_absolute() and config_path.parts[0] != CONFIGS:
        yield f"--config is {config_path}: t2g's image has only {CONFIGS}/; --image needs one with it in {HOME}"
    for name in config.log_options.trackers:
        if name not in ("tensorboard", "wandb"):
            yield f"log.trackers has {name}: t2g's image lacks its package; --image needs one with it"
    mirror = config.run.mirror
    if mirror and "://" in mirror and not mirror.startswith("file://"):
        yield (
            f"run.mirror is {mirror}: t2g's image lacks its package, and the pods have no credentials for it; --image "
            "needs one with the package, and the head the credentials (kustomization.yaml)"
        )
    for key, text in _find_texts(config.model_dump(mode="json")):
        is_code = key.rpartition(".")[2] in CODE_FIELDS
        match = IMPORT_PATH.fullmatch(text) if is_code else None
        if match and match[1] not in OWN_PACKAGES:
            yield f"{key} is {text}: t2g's image has no module {match[1]}; --image needs an image with it in {HOME}"


def _find_texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each text in JSON values."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _find_texts(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in value:
            yield from _find_texts(item, key)
