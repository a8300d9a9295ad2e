"""README.md of an exported model: what it was made of and what was measured, as hubs of models show it."""

from collections.abc import Mapping
from pathlib import Path

from t2g.config import PolicyJob, SFTJob
from t2g.files import write_atomic
from t2g.report.templates import number, plain
from t2g.runs.versions import versions

CARD = "README.md"


def write_model_card(
    model: Path, config: PolicyJob | SFTJob, base: Mapping[str, float] = {}, measured: Mapping[str, float] = {}
) -> None:
    """Beside the weights in `model`; base, measured: held-out metrics before and after."""
    job, _, _ = (type(config).__doc__ or "").partition(":")
    started = Path(config.model.policy)
    text = plain.get_template("model_card.md").render(
        base=started.name if started.is_dir() else config.model.policy,
        is_folder=started.is_dir(),
        run=config.run.name,
        job=job,
        version=versions().get("t2g", ""),
        task=config.task,
        data=Path(config.data.path).name if Path(config.data.path).exists() else config.data.path,
        seed=config.run.seed,
        figures={name: (number(base.get(name)), number(value)) for name, value in measured.items()},
    )
    write_atomic(model / CARD, text.encode(errors="replace"))
