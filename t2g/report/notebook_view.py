"""Curves and responses with colored spans for a notebook. There are no scripts, and every text is escaped."""

from collections.abc import Sequence
from dataclasses import dataclass

from t2g.report.charts import charts
from t2g.report.curves import DASHES
from t2g.report.held_out import Step
from t2g.report.templates import render
from t2g.runs.log import SampleRecord


@dataclass(frozen=True, kw_only=True)
class NotebookView:
    """Markup that a notebook shows, and a line for everything else."""

    markup: str
    summary: str

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.summary


def view_samples(samples: Sequence[SampleRecord], count: int) -> NotebookView:
    """Return the latest responses with their critiques, at most `count`; those with spans come first."""
    selected = select_samples(samples, count)
    markup = render("notebook.html", charts=[], samples=selected, dashes=DASHES)
    return NotebookView(markup=str(markup), summary=f"{len(selected)} responses; a notebook shows their spans")


def view_run(steps: Sequence[Step], samples: Sequence[SampleRecord], count: int) -> NotebookView:
    """Return the curves of a run, and its latest responses."""
    curves = list(charts({"policy": steps}, {}, None))
    markup = render("notebook.html", charts=curves, samples=select_samples(samples, count), dashes=DASHES)
    return NotebookView(markup=str(markup), summary=f"{len(steps)} logged steps; a notebook shows their curves")


def select_samples(samples: Sequence[SampleRecord], count: int) -> list[SampleRecord]:
    """Return the samples of the last step, with spans first, then those of earlier steps."""

    def rank(sample: SampleRecord) -> tuple[int, bool]:
        has_spans = sample.feedback is not None and bool(sample.feedback.spans)
        return -sample.step, not has_spans

    return sorted(samples, key=rank)[:count]
