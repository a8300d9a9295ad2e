"""The programs of docker/, which is no package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

DOCKER = Path(__file__).resolve().parents[1] / "docker"


def load_program(name: str) -> ModuleType:
    sys.path.insert(0, str(DOCKER))  # they import each other by name
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
