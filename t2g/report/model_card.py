"""Write the model card (README.md) of an exported model: its origin and its held-out metrics."""

from collections.abc import Mapping
from pathlib import Path

from t2g.config import PolicyJob, SFTJob
from t2g.files import write_atomic
from t2g.report.templates import plain
from t2g.runs.versions import collect_versions


def write_model_card(
    model: Path, config: PolicyJob | SFTJob, base: Mapping[str, float] = {}, measured: Mapping[str, float] = {}
) -> None:
    """Write README.md into the model's folder.

    Args:
        base: Held-out metrics before training.
        measured: Held-out metrics after training.
    """
    job = (type(config).__doc__ or "").partition(":")[0]
    values = {"config": config, "job": job, "versions": collect_versions(), "base": base, "measured": measured}
    text = plain.get_template("model_card.md").render(values)
    write_atomic(model / "README.md", text.encode(errors="replace"))
