"""The notebook of the guides, run from its first cell to its last, with a random model."""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from models import random_model

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "t2g" / "guides" / "notebooks" / "first_run.ipynb"
TIMEOUT_S = 900


def run_notebook(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run the notebook in a folder; return the results of each cell by its id."""
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "language": "python"}
    kernels = folder / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    (kernels / "kernel.json").write_text(json.dumps(spec | {"display_name": "Python 3"}))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs: dict[str, list[dict[str, Any]]] = {}
    for cell in notebook.cells:
        results = [output for output in cell.get("outputs", []) if output["output_type"] == "execute_result"]
        outputs[cell["id"]] = results
    return outputs


def test_the_notebook_trains_three_steps_and_shows_curves_and_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("T2G_MODEL", str(random_model(tmp_path / "model")))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[3]))
    outputs = run_notebook(tmp_path)
    (curves,) = outputs["curves"]
    assert curves["data"]["text/html"].count("<svg") > 5
    (samples,) = outputs["samples"]
    page = samples["data"]["text/html"]
    assert page.count("<tr>") == 1 + 8
    assert '<mark class="good">' in page and '<mark class="poor">' in page
    (metrics,) = outputs["metrics"]
    steps = [step for step, _ in ast.literal_eval(metrics["data"]["text/plain"])]
    assert steps == [1, 2, 3]


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
