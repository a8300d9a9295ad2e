"""The configs that are shipped, and what differs between two."""

import subprocess
from pathlib import Path

from t2g.config import Section
from t2g.config.loading import flatten

ROOT = Path(__file__).parents[1]


def shipped() -> list[Path]:
    """Those that git knows: beside them, in any of their folders, a user may keep others."""
    command = ["git", "ls-files", "configs/*.yaml"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return [ROOT / line for line in sorted(listed.splitlines())]


def differing(a: Section, b: Section) -> set[str]:
    """Dotted keys that differ, those that only one of the two has included."""
    left = flatten(a.model_dump())
    right = flatten(b.model_dump())
    absent = object()
    return {key for key in left.keys() | right.keys() if left.get(key, absent) != right.get(key, absent)}
