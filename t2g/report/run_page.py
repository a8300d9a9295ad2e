"""Write report.html of a run of jobs.train_policy, finished or not, or of several runs or arms.

All figures come from the files of the run folder: nothing is computed here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
from t2g.report.held_out import Step, headline, last_held_out, metric_rows
from t2g.report.templates import render_page
from t2g.report.token_strips import LEVELS, NAMES, LoggedSample, strips
from t2g.runs import metrics as m
from t2g.runs.log import ALARMS_FILE, COMMANDS_FILE, METRICS_FILE, SAMPLES_FILE, SampleRecord, read_records

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
BESIDE_FILE = "report_beside.html"
MAX_EXAMPLES = 24  # prompts with a response before and one after
MAX_SINGLES = 6  # prompts with one logged response
MAX_ALARMS = 50
MAX_TIMELINE = 12  # steps at which one prompt is shown
MAX_CONFIG_CHARS = 40_000
HIGH_SHARE, LEAST_AXIS = 0.5, 0.01  # the axis of a share from HIGH_SHARE on ends at 1; none is shorter than LEAST_AXIS
TOTALS = ("stages_and_arms_s", "wall_s")  # entries of `timing` that are sums of the other entries
OVER_STEPS = (  # title, label of the y axis (0 to 1 for a share), metrics
    ("Mean token reward", "mean token reward", (m.TOKEN_REWARD,)),
    ("Mean reward of a response", "spans and outcome rewards", (m.TOTAL_REWARD,)),
    ("Labelled tokens", "share of tokens", ("tokens/poor_share", "tokens/good_share")),
    ("KL to the reference", "nats per sequence", (m.KL,)),
    ("Entropy of the policy", "nats per token", (m.ENTROPY,)),
    ("PPO-clipped tokens", "share of tokens", ("policy/clip_share",)),
    ("Response length", "tokens", (m.LENGTH,)),
    ("Turns", "turns per conversation", (m.TURNS,)),
    ("Truncated responses", "share of responses", (m.TRUNCATED_SHARE,)),
    ("Idle", "share of the step", ("idle/learner", "idle/rollout", "idle/reward")),
    ("Time", "seconds", ("time/step_s", "time/generate_s", "time/feedback_s", "time/learn_s", "time/sync_s")),
)
Example = Sequence[SampleRecord]  # the responses to a prompt, by step
_SAMPLE = TypeAdapter(LoggedSample)
_STEP = TypeAdapter(dict[str, FiniteFloat | None])


class _Alarm(TypedDict):
    step: int
    alarm: str


_ALARM = TypeAdapter(_Alarm)


class _Summary(BaseModel):
    """The fields of summary.json that `write_report` reads by name. Other fields are shown as figures."""

    model_config = ConfigDict(extra="allow")

    base: dict[str, FiniteFloat | None] = {}
    reward_model: dict[str, FiniteFloat | None] = {}
    versions: dict[str, str] = {}
    timing: dict[str, Annotated[FiniteFloat, Field(ge=0)]] = {}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The content of a run folder."""

    steps: list[Step]
    summary: dict[str, Any]
    examples: list[Example]
    alarms: list[tuple[str, str]]  # step, message
    made: dict[str, str]


def find_run(folder: Path) -> Path:
    """Return the folder, or the folder of its smoke run if the run itself has not started."""
    smoke = folder / "smoke"
    return smoke if (smoke / METRICS_FILE).exists() and not (folder / METRICS_FILE).exists() else folder


def run_name(folder: Path) -> str:
    """Return the run's name from its config, or else the folder's name; a smoke run is marked as such."""
    match _read_config(folder):
        case {"run": {"name": str(name), "smoke": bool(smoke)}}:
            return f"{name} (smoke run)" if smoke else name
    return folder.resolve().name


def report_run(folder: Path) -> Path:
    """Write `folder`/report.html and return its path.

    Without a summary.json (the run has not finished) the figures at the top are those of the last step.

    Raises:
        UserError: The folder has no finished step, or a file with invalid content.
    """
    run, path = _read_run(folder), folder / REPORT_FILE
    title, arms = f"Text2Grad: {run_name(folder)}", {"policy": run.steps}
    write_report(
        path, title=title, summary=run.summary, arms=arms, examples=run.examples, made=run.made, alarms=run.alarms
    )
    return path


def report_beside(folders: Sequence[Path]) -> Path:
    """Write a page about several runs into the first run's folder, and return its path.

    It has charts with a line for each run, a table of the figures and config values that differ, and the last responses
    of each run to the same prompts.
    """
    short = [run_name(folder) for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    runs = [_read_run(folder) for folder in folders]
    latest = [{(s.split, s.prompt, s.sample_index): s for *_, s in run.examples} for run in runs]
    shared = [key for key in latest[0] if all(key in samples for samples in latest)]
    figures = [flatten(run.summary | {"config": _read_config(path)}) for run, path in zip(runs, folders, strict=True)]
    rows = {key: [values.get(key) for values in figures] for key in dict.fromkeys(chain(*figures))}
    in_results = ("base.", "policy.")  # prefixes of the figures that the table of held-out results shows
    path = folders[0] / BESIDE_FILE
    write_report(
        path,
        title=" and ".join(names),
        summary={},
        arms=dict(zip(names, (run.steps for run in runs), strict=True)),
        examples=[[samples[key] for samples in latest] for key in sorted(shared, key=lambda key: key[0] != "eval")],
        alarms=[(f"{name}, {when}", text) for name, run in zip(names, runs, strict=True) for when, text in run.alarms],
        beside={key: row for key, row in rows.items() if row[1:] != row[:-1] and not key.startswith(in_results)},
    )
    return path


def _read_config(folder: Path) -> Any:
    try:
        return yaml.safe_load((folder / FILE_NAME).read_bytes()) if (folder / FILE_NAME).is_file() else None
    except yaml.YAMLError as error:
        raise UserError(f"{folder / FILE_NAME} is not the config of a run ({error})") from error


def _read_run(folder: Path) -> _Run:
    steps = [step | {m.STEP: int(step[m.STEP])} for step in read_records(folder / METRICS_FILE, _STEP)]
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
            raise UserError(f"{path} is not the summary of a run ({format_first_error(error)})") from error
    return _Run(
        steps=steps,
        summary={"base": base} | summary,
        examples=examples(folder / SAMPLES_FILE),
        alarms=[(f"step {line[m.STEP]}", line["alarm"]) for line in read_records(folder / ALARMS_FILE, _ALARM)],
        made=how_made(folder),
    )


def examples(path: Path) -> list[Example]:
    """Return the logged responses by prompt and sample index, each in the order of the steps.

    Examples of two steps or more come first, among them those of held-out prompts, then those of the latest steps.
    """
    by_key: dict[tuple[str, str, str, int], list[SampleRecord]] = {}
    for sample in read_records(path, _SAMPLE):
        # A prompt_id is unique within one data set; the held-out data set may have the same id.
        responses = by_key.setdefault((sample.split, sample.prompt_id, sample.prompt, sample.sample_index), [])
        if not responses or sample.step > responses[-1].step:
            responses.append(sample)
    return sorted(by_key.values(), key=lambda rs: (len(rs) == 1, rs[-1].split != "eval", -rs[-1].step))


def how_made(folder: Path) -> dict[str, str]:
    """Return the last command, its date and the resolved config, each if there is such a file."""
    made = {}
    if (commands := folder / COMMANDS_FILE).is_file():
        last = commands.read_text(errors="replace").strip().rpartition("\n")[2]
        made["date"], _, made["command"] = last.partition(" ")
    if (config := folder / FILE_NAME).is_file():
        made["config"] = config.read_text(errors="replace")
    return {name: mask_secrets(text[:MAX_CONFIG_CHARS]) for name, text in made.items()}


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
    """Write the report of one run or of several arms, atomically replacing an older one.

    A typical example is at the top, other examples are below the charts. The first chart is of the held-out metric that
    eval/score repeats.

    Args:
        summary: Its numbers and strings are the figures at the top. Also read, if present: `base`, held-out metrics
            before training without the prefix `eval/`, which override those of step 0; `reward_model`, name -> share;
            `timing`, name -> seconds; `versions`.
        arms: name -> metrics by step, as in metrics.jsonl.
        examples: See `examples`.
        made: See `how_made`.
        alarms: (step, message).
        beside: Not None if the arms are runs with configs of their own: name -> the value of each run, of what differs.
            An example then has one response of each run.
    """
    bases = [m.select_held_out(steps[0]).items() for steps in arms.values() if steps and not steps[0].get(m.STEP)]
    first = dict(item for item in next(iter(bases), ()) if beside is None or all(item in base for base in bases))
    base, timing = first | summary.get("base", {}), summary.get("timing", {})
    parts = {name: value for name, value in timing.items() if name not in TOTALS}
    finals = {name: last_held_out(steps) for name, steps in arms.items()}
    metric, opening = headline(base, finals), typical_example(examples)
    rows = metric_rows(base, finals, first=metric)
    further = [example for example in examples if example is not opening]
    if beside is None:
        pairs = [ends(example) for example in further if len(example) > 1]
        singles = [example for example in further if len(example) == 1]
    else:
        pairs, singles = further, []
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
        has_errors=any(figure.error is not None for row in rows for figure in (row.base, *row.arms.values())),
        rows=rows,
        charts=list(charts(arms, base, metric)),
        examples=pairs[:MAX_EXAMPLES],
        singles=singles[:MAX_SINGLES],
        opening=opening if beside is not None else ends(opening),
        sides=["Before", "After"] if beside is None else [*arms],
        timeline=thinned(opening, MAX_TIMELINE) if beside is None else (),
        strips=strips([*chain(*examples)]) if beside is None else [],
        alarms=alarms[-MAX_ALARMS:],
        beside=beside,
        names=NAMES,
        levels=LEVELS,
        num_left_out=max(0, len(pairs) - MAX_EXAMPLES) + max(0, len(singles) - MAX_SINGLES),
        reward_model=summary.get("reward_model", {}),
        versions=summary.get("versions", {}),
        timing=parts,
        total_s=next((timing[name] for name in TOTALS if name in timing), None),
        longest_s=max(parts.values(), default=0) or 1,
    )


def typical_example(examples: Sequence[Example]) -> Example:
    """Return the example with the median change from the first to the last response, in good less poor spans.

    It is chosen among the held-out prompts with two judged responses, else among all prompts with two judged responses.
    Without such prompts it is the first example.
    """
    judged = [e for e in examples if len(e) > 1 and all(s.feedback and s.feedback.usable for s in ends(e))]
    pairs = [ends(e) for e in judged if e[-1].split == "eval" or judged[0][-1].split != "eval"]
    changes = [sum(s.label for s in b.feedback.spans) - sum(s.label for s in a.feedback.spans) for a, b in pairs]
    middle = sorted(range(len(changes)), key=changes.__getitem__)[len(changes) // 2 :][:1]
    return judged[middle[0]] if middle else next(iter(examples), ())


def ends(example: Example) -> Example:
    """Return the first and the last response of an example, or the only one."""
    return (example[0], example[-1])[: len(example)] if example else ()


def charts(
    arms: Mapping[str, Sequence[Step]], base: Mapping[str, float], metric: str | None
) -> Iterator[tuple[str, Markup, str | None, list[tuple[str, str]]]]:
    """Yield title, SVG, name of the dashed line, and names and classes of the lines, for each chart with points.

    The first charts are the held-out metric against samples and against the training reward: a line that falls on its
    right shows reward hacking. The charts of OVER_STEPS follow, with a line for each arm, or for each metric of a
    single arm, then those of outcome rewards and of the feedback function's metrics.
    """
    if metric is not None:
        level = base.get(metric)
        lines = [series(name, steps, m.SAMPLES, m.EVAL + metric) for name, steps in arms.items()]
        values = [y for line in lines for y in line.y] + ([] if level is None else [level])
        is_share = all(0 <= value <= 1 for value in values)
        y_range = share_range(values) if is_share else ()
        if svg := line_chart(lines, x_label="samples of training", y_label=metric, level=level, y_range=y_range):
            yield f"Held-out {metric}", svg, None if level is None else "base", legend_entries(lines)
        pairs = {name: m.pair_evaluations(steps, m.EVAL + metric) for name, steps in arms.items()}
        lines = [Series(name=n, x=[a for a, _ in found], y=[b for _, b in found]) for n, found in pairs.items()]
        if svg := line_chart(lines, x_label="mean training reward of a response", y_label=metric):
            yield f"Held-out {metric} by training reward", svg, None, legend_entries(lines)
    all_keys = dict.fromkeys(key for steps in arms.values() for step in steps for key in step)
    criteria = {key: key.partition("/")[2] for key in all_keys if key.startswith(m.CRITERION_REWARD)}
    by_criterion = [("Reward by criterion", "mean reward of a response", tuple(criteria))] if criteria else []
    if len(arms) > 1:
        by_criterion = [(f"Reward of {name}", "mean reward of a response", (key,)) for key, name in criteria.items()]
    numbers = [
        (f"{title} {key.removeprefix(prefix)}", "mean over responses", (key,))
        for prefix, title in ((m.OUTCOME_REWARD, "Outcome reward"), (m.FEEDBACK_METRICS, "Metric"))
        for key in all_keys
        if key.startswith(prefix)
    ]
    for title, y_label, keys in (*OVER_STEPS, *by_criterion, *numbers):
        several = len(keys) > 1
        lines = [
            series(key.partition("/")[2] if several and len(arms) == 1 else name, steps, m.STEP, key, len(arms) == 1)
            for name, steps in arms.items()
            for key in (keys if len(arms) == 1 else keys[:1])
        ]
        lines = [line for line in lines if line.y]
        title += f": {keys[0].partition('/')[2]}" if several and len(arms) > 1 else ""
        y_range = share_range(y for line in lines for y in line.y) if y_label.startswith("share") else ()
        if svg := line_chart(lines, x_label="step", y_label=y_label, y_range=y_range):
            yield title, svg, None, legend_entries(lines)


def share_range(values: Iterable[float]) -> tuple[float, float]:
    """Return what the axis of a share includes: 0, and 1 for a high share. A small share has an axis of its own size.

    >>> share_range([0.2, 0.75]), share_range([0.01, 0.03]), share_range([])
    ((0.0, 1.0), (0.0, 0.03), (0.0, 0.01))
    """
    largest = max(values, default=0.0)
    return (0.0, 1.0) if largest >= HIGH_SHARE else (0.0, max(largest, LEAST_AXIS))


def series(name: str, steps: Sequence[Step], x: str, y: str, by_label: bool = False) -> Series:
    """Return the line of an arm. Step 0 has no samples; a step whose x or y is null has no point.

    Args:
        by_label: A share of good tokens is green, a share of poor tokens red.
    """
    points = [(step.get(x, 0.0), step.get(y)) for step in steps]
    points = [point for point in points if None not in point]
    label = y.partition("/")[2].partition("_")[0]
    style = label if by_label and label in ("good", "poor") else ""
    return Series(name=name, x=[a for a, _ in points], y=[b for _, b in points], style=style)
