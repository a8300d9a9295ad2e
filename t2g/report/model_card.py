"""README.md of an exported model: what it was made of and what was measured, as hubs of models show it."""

from collections.abc import Mapping
from pathlib import Path

from t2g.config import PolicyJob, SFTJob
from t2g.files import write_atomic
from t2g.report.templates import plain
from t2g.runs.versions import collect_versions


def write_model_card(
    model: Path, config: PolicyJob | SFTJob, base: Mapping[str, float] = {}, measured: Mapping[str, float] = {}
) -> None:
    """Beside the weights in `model`; base, measured: held-out metrics before and after."""
    job = (type(config).__doc__ or "").partition(":")[0]
    values = {"config": config, "job": job, "versions": collect_versions(), "base": base, "measured": measured}
    text = plain.get_template("model_card.md").render(values)
    write_atomic(model / "README.md", text.encode(errors="replace"))
