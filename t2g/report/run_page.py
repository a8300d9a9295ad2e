"""The report of a run folder of jobs.train_policy, finished or not, from the files that the run writes; and of several
arms. Deliberately no numbers of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from t2g.config.loading import FILE_NAME, flatten
from t2g.config.texts import mask_secrets
from t2g.config.validation_errors import format_first_error
from t2g.errors import UserError
from t2g.report.curves import DASHES, Series, legend_entries, line_chart, thinned
from t2g.report.templates import render_page
from t2g.report.token_strips import LEVELS, NAMES, LoggedSample, strips
from t2g.runs import metrics as m
from t2g.runs.log import ALARMS_FILE, COMMANDS_FILE, METRICS_FILE, SAMPLES_FILE, SampleRecord, read_records

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
BESIDE_FILE = "report_beside.html"
MAX_EXAMPLES = 24
MAX_ALARMS = 50
MAX_TIMELINE = 12  # steps at which one prompt is shown
MAX_CONFIG_CHARS = 40_000
TOTALS = ("stages_and_arms_s", "wall_s")  # of the other entries of `timing`
OVER_STEPS = (  # title, unit of the axis (a share has one from 0 to 1), metrics
    ("Mean token reward", "mean token reward", (m.TOKEN_REWARD,)),
    ("Labelled tokens", "share of tokens", ("tokens/poor_share", "tokens/good_share")),
    ("KL to the reference", "nats per sequence", (m.KL,)),
    ("Entropy of the policy", "nats per token", (m.ENTROPY,)),
    ("PPO-clipped tokens", "share of tokens", ("policy/clip_share",)),
    ("Response length", "tokens", (m.LENGTH,)),
    ("Truncated responses", "share of responses", (m.TRUNCATED_SHARE,)),
    ("Idle", "share of the step", ("idle/learner", "idle/rollout", "idle/reward")),
    ("Time", "seconds", ("time/step_s", "time/generate_s", "time/feedback_s", "time/learn_s", "time/sync_s")),
)
Step = Mapping[str, Any]
Example = Sequence[SampleRecord]  # the responses to a prompt, by step
_SAMPLE = TypeAdapter(LoggedSample)
_STEP = TypeAdapter(dict[str, FiniteFloat | None])


class _Alarm(TypedDict):
    step: int
    alarm: str


_ALARM = TypeAdapter(_Alarm)


class _Summary(BaseModel):
    """Of summary.json what `write_report` reads by name; the rest is figures."""

    model_config = ConfigDict(extra="allow")

    base: dict[str, FiniteFloat | None] = {}
    reward_model: dict[str, FiniteFloat | None] = {}
    versions: dict[str, str] = {}
    timing: dict[str, Annotated[FiniteFloat, Field(ge=0)]] = {}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What the files of a run folder hold."""

    steps: list[Step]
    summary: dict[str, Any]
    examples: list[Example]
    alarms: list[tuple[str, str]]  # when, sentence
    made: dict[str, str]


def find_run(folder: Path) -> Path:
    """Return the folder, or that of its smoke run where the run itself has not been started."""
    smoke = folder / "smoke"
    return smoke if (smoke / METRICS_FILE).exists() and not (folder / METRICS_FILE).exists() else folder


def run_name(folder: Path) -> str:
    """Return the name by the config of a run folder, else that of the folder; a smoke run is called so."""
    match _settings(folder):
        case {"run": {"name": str(name), "smoke": bool(smoke)}}:
            return f"{name} (smoke run)" if smoke else name
    return folder.resolve().name


def report_run(folder: Path) -> Path:
    """Write `folder`/report.html and return its path.

    Without a summary.json (the run goes on) the figures at the top are those of the last step.
    Raises UserError when the folder holds no finished step, or a file that no run wrote.
    """
    run, path = _read_run(folder), folder / REPORT_FILE
    title, arms = f"Text2Grad: {run_name(folder)}", {"policy": run.steps}
    write_report(
        path, title=title, summary=run.summary, arms=arms, examples=run.examples, made=run.made, alarms=run.alarms
    )
    return path


def report_beside(folders: Sequence[Path]) -> Path:
    """The same page of several runs, in the folder of the first: their curves in one picture, their figures and what
    differs of their configs in a column each, their last responses to the same prompts.
    """
    short = [run_name(folder) for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    runs = [_read_run(folder) for folder in folders]
    latest = [{(s.split, s.prompt, s.sample_index): s for *_, s in run.examples} for run in runs]
    shared = [key for key in latest[0] if all(key in found for found in latest)]
    figures = [flatten(run.summary | {"config": _settings(folder)}) for run, folder in zip(runs, folders, strict=True)]
    rows = {key: [found.get(key) for found in figures] for key in dict.fromkeys(k for found in figures for k in found)}
    told = ("base.", "policy.")  # in the table of held-out results
    path = folders[0] / BESIDE_FILE
    write_report(
        path,
        title=" and ".join(names),
        summary={},
        arms=dict(zip(names, (run.steps for run in runs), strict=True)),
        examples=[[found[key] for found in latest] for key in sorted(shared, key=lambda key: key[0] != "eval")],
        alarms=[(f"{name}, {when}", text) for name, run in zip(names, runs, strict=True) for when, text in run.alarms],
        beside={key: row for key, row in rows.items() if row[1:] != row[:-1] and not key.startswith(told)},
    )
    return path


def _settings(folder: Path) -> Any:
    try:
        return yaml.safe_load((folder / FILE_NAME).read_bytes()) if (folder / FILE_NAME).is_file() else None
    except yaml.YAMLError as error:
        raise UserError(f"{folder / FILE_NAME} is no config as a run writes it ({error})") from error


def _read_run(folder: Path) -> _Run:
    steps = [step | {m.STEP: int(step[m.STEP])} for step in _read(folder / METRICS_FILE, _STEP)]
    if not steps:
        raise UserError(
            f"{folder / METRICS_FILE} holds no finished step: the folder of a run of jobs.train_policy is needed"
        )
    base = next((m.select_held_out(step) for step in steps if step[m.STEP] == 0), {})
    path = folder / SUMMARY_FILE
    summary = {"steps": steps[-1][m.STEP], "samples": int(steps[-1].get(m.SAMPLES) or 0)}
    if path.exists():
        try:
            summary = _Summary.model_validate_json(path.read_bytes()).model_dump(exclude_unset=True)
        except ValidationError as error:
            raise UserError(f"{path} is no summary as a run writes it ({format_first_error(error)})") from error
    return _Run(
        steps=steps,
        summary={"base": base} | summary,
        examples=examples(folder / SAMPLES_FILE),
        alarms=[(f"step {line[m.STEP]}", line["alarm"]) for line in _read(folder / ALARMS_FILE, _ALARM)],
        made=how_made(folder),
    )


def examples(path: Path) -> list[Example]:
    """One for each sample of a prompt, by step. Prompts answered at two steps come first, among them held-out ones,
    then the latest.
    """
    found: dict[tuple[str, str, str, int], list[SampleRecord]] = {}
    for sample in _read(path, _SAMPLE):
        # Ids are unique in one data set only, and the held-out one is another.
        responses = found.setdefault((sample.split, sample.prompt_id, sample.prompt, sample.sample_index), [])
        if not responses or sample.step > responses[-1].step:
            responses.append(sample)
    return sorted(found.values(), key=lambda of: (len(of) == 1, of[-1].split != "eval", -of[-1].step))


def how_made(folder: Path) -> dict[str, str]:
    """The last command, when it was given, and the resolved config; what of them is there."""
    made = {}
    if (commands := folder / COMMANDS_FILE).is_file():
        last = commands.read_text(errors="replace").strip().rpartition("\n")[2]
        made["date"], _, made["command"] = last.partition(" ")
    if (config := folder / FILE_NAME).is_file():
        made["config"] = config.read_text(errors="replace")
    return {name: mask_secrets(text[:MAX_CONFIG_CHARS]) for name, text in made.items()}


def _read(path: Path, schema: TypeAdapter[Any]) -> Iterator[Any]:
    """The lines of a file that a RunLog wrote. UserError for one that it did not."""
    for number, record in read_records(path):
        try:
            yield schema.validate_python(record)
        except ValidationError as error:
            raise UserError(f"{path}:{number} is no line as a run writes it ({format_first_error(error)})") from error


def write_report(
    path: Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    arms: Mapping[str, Sequence[Step]],
    examples: Sequence[Example],
    made: Mapping[str, str] = {},
    alarms: Sequence[tuple[str, str]] = (),
    beside: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write the report of one run or of several arms, replacing an older one at once.

    It opens with a typical example; the others stand below the charts.
    summary: its plain values (no mappings, no yes or no) become the figures at the top. Read of it, where it has them:
    `base`, held-out metrics of the policy before training, without `eval/`, beside those of an arm's step 0;
    `reward_model`, name -> share; `timing`, stage -> seconds, those in TOTALS apart; `versions`. arms: name -> metrics
    by step, as in metrics.jsonl. examples: see `examples`; made: see `how_made`; alarms: when, sentence. The first
    chart is of the held-out metric that eval/score repeats. beside: the arms are runs of their own, whose examples are
    a response of each, and in which this differs: name -> a value for each.
    """
    bases = [m.select_held_out(steps[0]).items() for steps in arms.values() if steps and not steps[0].get(m.STEP)]
    first = dict(item for item in next(iter(bases), ()) if beside is None or all(item in base for base in bases))
    base, timing = first | summary.get("base", {}), summary.get("timing", {})
    parts = {name: value for name, value in timing.items() if name not in TOTALS}
    finals = {name: last_held_out(steps) for name, steps in arms.items()}
    metric, opening = headline(base, finals), typical_example(examples)
    others = [example for example in examples if example is not opening]
    render_page(
        path,
        "template.html",
        title=title,
        dashes=DASHES,
        figures={name: v for name, v in summary.items() if not isinstance(v, Mapping | list | tuple | bool)},
        made=made,
        metric=metric,
        base=base,
        finals=finals,
        rows=metric_rows(base, finals, first=metric),
        charts=list(charts(arms, base, metric)),
        examples=[of if beside is not None else ends(of) for of in others[:MAX_EXAMPLES]],
        opening=opening if beside is not None else ends(opening),
        sides=["Before", "After"] if beside is None else [*arms],
        timeline=thinned(opening, MAX_TIMELINE) if beside is None else (),
        strips=strips([one for of in examples for one in of]) if beside is None else [],
        alarms=alarms[-MAX_ALARMS:],
        beside=beside,
        names=NAMES,
        levels=LEVELS,
        num_left_out=max(0, len(others) - MAX_EXAMPLES),
        reward_model=summary.get("reward_model", {}),
        versions=summary.get("versions", {}),
        timing=parts,
        total_s=next((timing[name] for name in TOTALS if name in timing), None),
        longest_s=max(parts.values(), default=0) or 1,
    )


def typical_example(examples: Sequence[Example]) -> Example:
    """Return the example whose change is the median one: good less poor spans of the last response against the first.

    Held-out prompts come first, then others that were answered and judged twice; without any it is the first example.
    """
    judged = [of for of in examples if len(of) > 1 and all(one.feedback and one.feedback.usable for one in ends(of))]
    pairs = [ends(of) for of in judged if of[-1].split == "eval" or judged[0][-1].split != "eval"]
    changes = [sum(s.label for s in b.feedback.spans) - sum(s.label for s in a.feedback.spans) for a, b in pairs]
    middle = sorted(range(len(changes)), key=changes.__getitem__)[len(changes) // 2 :][:1]
    return judged[middle[0]] if middle else next(iter(examples), ())


def ends(example: Example) -> Example:
    """Return the first response and the last one, where there are two."""
    return (example[0], example[-1])[: len(example)] if example else ()


def charts(
    arms: Mapping[str, Sequence[Step]], base: Mapping[str, float], metric: str | None
) -> Iterator[tuple[str, Markup, str | None, list[tuple[str, str]]]]:
    """Yield title, picture, name of the dashed line, and name and class of the others, for each chart with points.

    The first is the held-out metric against samples, then what OVER_STEPS names against steps: a line for each arm, or
    for each of several metrics of a single arm.
    """
    if metric is not None:
        level = base.get(metric)
        lines = [series(name, steps, m.SAMPLES, m.EVAL + metric) for name, steps in arms.items()]
        is_share = all(0 <= y <= 1 for line in lines for y in line.y)
        y_range = (0.0, 1.0) if is_share else ()
        if svg := line_chart(lines, x_label="samples of training", y_label=metric, level=level, y_range=y_range):
            yield f"Held-out {metric}", svg, None if level is None else "base", legend_entries(lines)
    for title, y_label, keys in OVER_STEPS:
        several = len(keys) > 1
        lines = [
            series(key.partition("/")[2] if several and len(arms) == 1 else name, steps, m.STEP, key, len(arms) == 1)
            for name, steps in arms.items()
            for key in (keys if len(arms) == 1 else keys[:1])
        ]
        lines = [line for line in lines if line.y]
        title += f": {keys[0].partition('/')[2]}" if several and len(arms) > 1 else ""
        y_range = (0.0, 1.0) if y_label.startswith("share") else ()
        if svg := line_chart(lines, x_label="step", y_label=y_label, y_range=y_range):
            yield title, svg, None, legend_entries(lines)


def series(name: str, steps: Sequence[Step], x: str, y: str, by_label: bool = False) -> Series:
    """Return one arm's line; step 0 has no samples yet, and a step where x or y is null is no point.

    by_label: a share of good tokens is green, one of poor tokens red.
    """
    points = [(step.get(x, 0.0), step.get(y)) for step in steps]
    found = [point for point in points if None not in point]
    label = y.partition("/")[2].partition("_")[0]
    style = label if by_label and label in ("good", "poor") else ""
    return Series(name=name, x=[a for a, _ in found], y=[b for _, b in found], style=style)


def last_held_out(steps: Sequence[Step]) -> dict[str, float]:
    """Held-out metrics of the last step that evaluated, without their prefix."""
    return next((found for step in reversed(steps) if (found := m.select_held_out(step))), {})


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
