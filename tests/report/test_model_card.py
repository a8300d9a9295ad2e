"""The card of a model names its data without their folders."""

from pathlib import Path

import pytest

from t2g.config import SFTJob
from t2g.report.model_card import write_model_card


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a/b.jsonl", "b.jsonl"), (("/a/b.jsonl", "/c/d.jsonl"), "b.jsonl and 1 more"), ("org/set", "org/set")],
)
def test_the_data_are_named(tmp_path: Path, path: str | tuple[str, ...], name: str) -> None:
    write_model_card(tmp_path, SFTJob.model_validate({"model": {"policy": "/x/y"}, "data": {"path": path}}))
    assert f"\n`{name}`, seed" in (tmp_path / "README.md").read_text()
