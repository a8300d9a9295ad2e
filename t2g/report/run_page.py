"""The report of a run folder of jobs.train_policy, finished or not, from the files that the run writes; and of several
arms. Deliberately no numbers of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from t2g.config.words import first_problem
from t2g.errors import UserError
from t2g.report.curves import DASHES, Series, line_chart
from t2g.report.templates import render_page
from t2g.runs import metrics as m
from t2g.runs.log import METRICS_FILE, SAMPLES_FILE, SampleRecord, read_records

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
MAX_EXAMPLES = 24
Step = Mapping[str, Any]
Example = Sequence[SampleRecord]  # the first response to a prompt and the last, or the only one
_SAMPLE = TypeAdapter(SampleRecord)
_STEP = TypeAdapter(dict[str, FiniteFloat | None])


class _Summary(BaseModel):
    """Of summary.json what `write_report` reads by name; the rest is figures."""

    model_config = ConfigDict(extra="allow")

    base: dict[str, FiniteFloat | None] = {}
    reward_model: dict[str, FiniteFloat | None] = {}
    versions: dict[str, str] = {}
    timing: dict[str, Annotated[FiniteFloat, Field(ge=0)]] = {}


def report_run(folder: Path) -> Path:
    """Write `folder`/report.html and return its path.

    Without a summary.json (the run goes on) the figures at the top are those of the last step.
    Raises UserError when the folder holds no finished step, or a file that no run wrote.
    """
    steps = [step | {m.STEP: int(step[m.STEP])} for step in _read(folder / METRICS_FILE, _STEP)]
    if not steps:
        raise UserError(
            f"{folder / METRICS_FILE} holds no finished step: --run needs the folder of a run of jobs.train_policy"
        )
    base = next((m.held_out(step) for step in steps if step[m.STEP] == 0), {})
    path = folder / SUMMARY_FILE
    summary = {"steps": steps[-1][m.STEP], "samples": int(steps[-1].get(m.SAMPLES, 0))}
    if path.exists():
        try:
            summary = _Summary.model_validate_json(path.read_bytes()).model_dump(exclude_unset=True)
        except ValidationError as error:
            raise UserError(f"{path} is no summary as a run writes it ({first_problem(error)})") from error
    write_report(
        folder / REPORT_FILE,
        title=f"Text2Grad: {folder.resolve().name}",
        summary={"base": base} | summary,
        arms={"policy": steps},
        examples=examples(folder / SAMPLES_FILE),
    )
    return folder / REPORT_FILE


def examples(path: Path) -> list[Example]:
    """One for each sample of a prompt. Prompts answered at two steps come first, among them held-out ones, then the
    latest.
    """
    found: dict[tuple[str, str, str, int], list[SampleRecord]] = {}
    for sample in _read(path, _SAMPLE):
        # Ids are unique in one data set only, and the held-out one is another.
        responses = found.setdefault((sample.split, sample.prompt_id, sample.prompt, sample.sample_index), [])
        if not responses or sample.step > responses[-1].step:
            responses[1:] = [sample]
    return sorted(found.values(), key=lambda of: (len(of) == 1, of[-1].split != "eval", -of[-1].step))


def _read(path: Path, schema: TypeAdapter[Any]) -> Iterator[Any]:
    """The lines of a file that a RunLog wrote. UserError for one that it did not."""
    for number, record in read_records(path):
        try:
            yield schema.validate_python(record)
        except ValidationError as error:
            raise UserError(f"{path}:{number} is no line as a run writes it ({first_problem(error)})") from error


def write_report(
    path: Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    arms: Mapping[str, Sequence[Step]],
    examples: Sequence[Example],
) -> None:
    """Write the report of one run or of several arms, replacing an older one at once.

    summary: its plain values (no mappings) become the figures at the top. Read of it, where it has them: `base`,
    held-out metrics of the policy before training, without `eval/`; `reward_model`, name -> share; `timing`, stage ->
    seconds; `versions`. arms: name -> metrics by step, as in metrics.jsonl. The first chart is of the held-out metric
    that eval/score repeats.
    """
    base, timing = summary.get("base", {}), summary.get("timing", {})
    finals = {name: last_held_out(steps) for name, steps in arms.items()}
    metric = headline(base, finals)
    render_page(
        path,
        "template.html",
        title=title,
        dashes=DASHES,
        figures={name: value for name, value in summary.items() if not isinstance(value, Mapping | list | tuple)},
        metric=metric,
        base=base,
        finals=finals,
        rows=metric_rows(base, finals, first=metric),
        charts=list(charts(arms, base, metric)),
        examples=examples[:MAX_EXAMPLES],
        num_left_out=max(0, len(examples) - MAX_EXAMPLES),
        reward_model=summary.get("reward_model", {}),
        versions=summary.get("versions", {}),
        timing=timing,
        longest_s=max(timing.values(), default=0) or 1,
    )


def charts(
    arms: Mapping[str, Sequence[Step]], base: Mapping[str, float], metric: str | None
) -> Iterator[tuple[str, Markup, str | None]]:
    """Title, picture and name of the dashed line: the held-out metric against samples, then token reward, KL and length
    against steps; those that have points.
    """
    wanted = [
        ("Mean token reward", m.STEP, m.TOKEN_REWARD, "step", "mean token reward"),
        ("KL to the reference", m.STEP, m.KL, "step", "nats per sequence"),
        ("Response length", m.STEP, m.LENGTH, "step", "tokens"),
    ]
    if metric is not None:
        wanted.insert(0, (f"Held-out {metric}", m.SAMPLES, m.EVAL + metric, "samples", metric))
    for title, x, y, x_label, y_label in wanted:
        level = base.get(metric) if y == m.EVAL + str(metric) else None
        svg = line_chart([series(n, s, x, y) for n, s in arms.items()], x_label=x_label, y_label=y_label, level=level)
        if svg:
            yield title, svg, None if level is None else "base"


def series(name: str, steps: Sequence[Step], x: str, y: str) -> Series:
    """One arm's line; step 0 has no samples yet, and a null is no point."""
    found = [(step.get(x, 0.0), step[y]) for step in steps if step.get(y) is not None]
    return Series(name=name, x=[a for a, _ in found], y=[b for _, b in found])


def last_held_out(steps: Sequence[Step]) -> dict[str, float]:
    """Held-out metrics of the last step that evaluated, without their prefix."""
    return next((found for step in reversed(steps) if (found := m.held_out(step))), {})


def headline(base: Mapping[str, float], finals: Mapping[str, Mapping[str, float]]) -> str | None:
    """The metric that `score` repeats, else `score`, else the first there is."""
    known = [base, *finals.values()]
    names = [name for values in known for name in values if name != "score"]
    for name in names:
        if all(values.get(name) == values["score"] for values in known if "score" in values):
            return name
    return "score" if any("score" in values for values in known) else next(iter(names), None)


def metric_rows(
    base: Mapping[str, float], finals: Mapping[str, Mapping[str, float]], *, first: str | None
) -> list[tuple[str, float | None, list[float | None]]]:
    """(metric, base, one value per arm), `first` on top; `score` is left out where it only repeats `first`."""
    names = dict.fromkeys([first] if first else [])
    names |= dict.fromkeys(name for values in (base, *finals.values()) for name in values)
    if first != "score":
        names.pop("score", None)
    return [(name, base.get(name), [values.get(name) for values in finals.values()]) for name in names]
