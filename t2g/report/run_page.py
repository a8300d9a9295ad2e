"""Write report.html of a run of jobs.train_policy, finished or not, or of several runs or methods.

All figures come from the files of the run folder: nothing is computed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from t2g import metrics as m
from t2g.config.loading import FILE_NAME, flatten
from t2g.config.secrets import mask_secrets
from t2g.config.validation_errors import format_first_error
from t2g.errors import UserError
from t2g.report.charts import charts
from t2g.report.curves import DASHES, thin_points
from t2g.report.held_out import Step, headline, last_held_out, metric_rows
from t2g.report.templates import render_page
from t2g.report.token_strips import LEVELS, NAMES, LoggedSample, strips
from t2g.runs.log import ALARMS_FILE, COMMANDS_FILE, METRICS_FILE, SAMPLES_FILE, SampleRecord, read_records

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
BESIDE_FILE = "report_beside.html"
MAX_EXAMPLES = 24  # prompts with a response before and one after
MAX_SINGLES = 6  # prompts with one logged response
MAX_ALARMS = 50
MAX_TIMELINE = 12  # steps at which one prompt is shown
MAX_CONFIG_CHARS = 40_000
IN_RESULTS = ("base.", "policy.")  # prefixes of the figures that the table of held-out results shows
TOTALS = ("all_phases_s", "wall_s")  # entries of `timing` that are sums of the other entries
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
    origin: dict[str, str]


def find_run(folder: Path) -> Path:
    """Return the folder, or the folder of its smoke run if the run itself has not started."""
    smoke = folder / "smoke"
    has_started = (folder / METRICS_FILE).exists()
    if not has_started and (smoke / METRICS_FILE).exists():
        return smoke
    return folder


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
    run = _read_run(folder)
    path = folder / REPORT_FILE
    write_report(
        path,
        title=f"Text2Grad: {run_name(folder)}",
        summary=run.summary,
        methods={"policy": run.steps},
        examples=run.examples,
        origin=run.origin,
        alarms=run.alarms,
    )
    return path


def report_beside(folders: Sequence[Path]) -> Path:
    """Write a page about several runs into the first run's folder, and return its path.

    It has charts with a line for each run, a table of the figures and config values that differ, and the last responses
    of each run to the same prompts.
    """
    names = _distinct_names(folders)
    runs = [_read_run(folder) for folder in folders]
    methods = {}
    alarms = []
    figures = []
    for folder, name, run in zip(folders, names, runs, strict=True):
        methods[name] = run.steps
        alarms += [(f"{name}, {when}", text) for when, text in run.alarms]
        figures.append(flatten(run.summary | {"config": _read_config(folder)}))
    path = folders[0] / BESIDE_FILE
    write_report(
        path,
        title=" and ".join(names),
        summary={},
        methods=methods,
        examples=_shared_examples(runs),
        alarms=alarms,
        beside=_differences(figures),
    )
    return path


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the runs, or their folders if two runs share a name."""
    names = [run_name(folder) for folder in folders]
    if len(set(names)) < len(names):
        return [str(folder) for folder in folders]
    return names


def _shared_examples(runs: Sequence[_Run]) -> list[Example]:
    """Return the last responses of each run to the prompts that all runs logged, held-out prompts first."""
    latest = []  # latest steps of each run
    for run in runs:
        last_samples = [example[-1] for example in run.examples]
        latest.append({(sample.split, sample.prompt, sample.sample_index): sample for sample in last_samples})
    shared_keys = set(latest[0]).intersection(*latest)
    shared = []
    for key in filter(shared_keys.__contains__, latest[0]):
        responses = [samples[key] for samples in latest]
        shared.append(responses)
    return sorted(shared, key=lambda example: example[0].split != "eval")


def _differences(figures: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return name -> value in each run, of the figures that differ and that no table of held-out results shows."""
    differing = {}
    for key in dict.fromkeys(chain(*figures)):
        row = [values.get(key) for values in figures]
        if row[1:] != row[:-1] and not key.startswith(IN_RESULTS):
            differing[key] = row
    return differing


def _read_config(folder: Path) -> Any:
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        return yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not the config of a run ({error})") from error


def _read_run(folder: Path) -> _Run:
    steps = []
    for record in read_records(folder / METRICS_FILE, _STEP):
        number = int(record[m.STEP])
        steps.append(record | {m.STEP: number})
    if not steps:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
        raise UserError(
            f"{folder / METRICS_FILE} holds no finished step: the folder of a run of jobs.train_policy is needed"
        )
    before_training = [step for step in steps if step[m.STEP] == 0]
    base = m.select_held_out(before_training[0]) if before_training else {}
    summary = _read_summary(folder / SUMMARY_FILE, steps[-1])
    samples = load_examples(folder / SAMPLES_FILE)
    alarms = read_records(folder / ALARMS_FILE, _ALARM)
    return _Run(
        steps=steps,
        summary={"base": base} | summary,
        examples=samples,
        alarms=[(f"step {line[m.STEP]}", line["alarm"]) for line in alarms],
        origin=find_origin(folder),
    )


def _read_summary(path: Path, last_step: Step) -> dict[str, Any]:
    """Return the summary of a run, or the progress of a run that has not finished, or was extended since."""
    samples = last_step.get(m.SAMPLES) or 0
    progress = {"steps": last_step[m.STEP], "samples": int(samples)}
    if not path.exists():
        return progress
    try:
        summary = _Summary.model_validate_json(path.read_bytes()).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise UserError(f"{path} is not the summary of a run ({format_first_error(error)})") from error
    is_extended = summary.get("steps", last_step[m.STEP]) < last_step[m.STEP]
    return progress if is_extended else summary


def read_samples(path: Path) -> list[LoggedSample]:
    """Return the logged responses; none before the first."""
    return [*read_records(path, _SAMPLE)]


def load_examples(path: Path) -> list[Example]:
    """Return the logged responses by prompt and sample index, each in the order of the steps.

    Examples of two steps or more come first, among them those of held-out prompts, then those of the latest steps.
    """
    by_key: dict[tuple[str, str, str, int], list[SampleRecord]] = {}
    for sample in read_records(path, _SAMPLE):
        # A prompt_id is unique within one data set; the held-out data set may have the same id.
        key = (sample.split, sample.prompt_id, sample.prompt, sample.sample_index)
        responses = by_key.setdefault(key, [])
        if not responses or sample.step > responses[-1].step:
            responses.append(sample)

    def rank(responses: Example) -> tuple[bool, bool, int]:
        last = responses[-1]
        return len(responses) == 1, last.split != "eval", -last.step

    return sorted(by_key.values(), key=rank)


def find_origin(folder: Path) -> dict[str, str]:
    """Return the last command, its date and the resolved config, each if there is such a file."""
    origin = {}
    commands = folder / COMMANDS_FILE
    if commands.is_file():
        last = commands.read_text(errors="replace").strip().rpartition("\n")[2]
        origin["date"], _, origin["command"] = last.partition(" ")
    config = folder / FILE_NAME
    if config.is_file():
        origin["config"] = config.read_text(errors="replace")
    return {name: mask_secrets(text)[:MAX_CONFIG_CHARS] for name, text in origin.items()}


def write_report(
    path: Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    methods: Mapping[str, Sequence[Step]],
    examples: Sequence[Example],
    origin: Mapping[str, str] = {},
    alarms: Sequence[tuple[str, str]] = (),
    beside: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write the report of one run or of several methods, atomically replacing an older one.

    A typical example is at the top, other examples are below the charts. The first chart is of the held-out metric that
    eval/score repeats.

    Args:
        summary: Its numbers and strings are the figures at the top. Also read, if present: `base`, held-out metrics
            before training without the prefix `eval/`, which override those of step 0; `reward_model`, name -> share;
            `timing`, name -> seconds; `versions`.
        methods: name -> metrics by step, as in metrics.jsonl.
        examples: See `load_examples`.
        origin: See `find_origin`.
        alarms: (step, message).
        beside: Not None if the methods are runs with configs of their own: name -> the value of each run, of what
            differs. An example then has one response of each run.
    """
    base = _base_metrics(methods, must_share=beside is not None) | summary.get("base", {})
    finals = {name: last_held_out(steps) for name, steps in methods.items()}
    metric = headline(base, finals)
    rows = metric_rows(base, finals, first=metric)
    has_errors = any(row.has_error for row in rows)
    results = {"metric": metric, "base": base, "finals": finals, "rows": rows, "has_errors": has_errors}
    labels = {"title": title, "names": NAMES, "levels": LEVELS, "dashes": DASHES}
    history = {"origin": origin, "versions": summary.get("versions", {})}
    figures = {name: value for name, value in summary.items() if _is_plain(value)}
    timing = _timing_values(summary.get("timing", {}))
    responses = _example_values(examples) if beside is None else _beside_values(examples, [*methods])
    render_page(
        path,
        "template.html",
        **labels,
        figures=figures,
        charts=list(charts(methods, base, metric)),
        alarms=alarms[-MAX_ALARMS:],
        beside=beside,
        **history,
        **results,
        **timing,
        **responses,
        reward_model=summary.get("reward_model", {}),
    )


def _base_metrics(methods: Mapping[str, Sequence[Step]], *, must_share: bool) -> dict[str, float]:
    """Return the held-out metrics at step 0 of the first method that has this step.

    Args:
        must_share: Only values that all methods share.
    """
    bases = []
    for steps in methods.values():
        if steps and not steps[0].get(m.STEP):
            base = m.select_held_out(steps[0])
            bases.append(base.items())
    if not bases:
        return {}
    first = bases[0]
    if must_share:
        for other in bases[1:]:
            first = [item for item in first if item in other]
    return dict(first)


def _is_plain(value: Any) -> bool:
    """Return whether a value of a summary is a figure at the top: a number or a text."""
    return not isinstance(value, Mapping | list | tuple | bool)


def _timing_values(timing: Mapping[str, float]) -> dict[str, Any]:
    """Return what the page shows of the times of a run's parts."""
    parts = {name: seconds for name, seconds in timing.items() if name not in TOTALS}
    totals = [timing[name] for name in TOTALS if name in timing]
    return {
        "timing": parts,
        "total_s": totals[0] if totals else None,
        "longest_s": max(parts.values(), default=0) or 1,
    }


def _example_values(examples: Sequence[Example]) -> dict[str, Any]:
    """Return what the page shows of the responses of one run, or of the methods of one run."""
    opening = typical_example(examples)
    further = [example for example in examples if example is not opening]
    pairs = [first_and_last(example) for example in further if len(example) > 1]
    singles = [example for example in further if len(example) == 1]
    pairs_left_out = max(0, len(pairs) - MAX_EXAMPLES)
    singles_left_out = max(0, len(singles) - MAX_SINGLES)
    return {
        "examples": pairs[:MAX_EXAMPLES],
        "singles": singles[:MAX_SINGLES],
        "num_left_out": pairs_left_out + singles_left_out,
        "opening": first_and_last(opening),
        "sides": ["Before", "After"],
        "timeline": thin_points(opening, MAX_TIMELINE),
        "strips": strips([*chain(*examples)]),
    }


def _beside_values(examples: Sequence[Example], names: Sequence[str]) -> dict[str, Any]:
    """Return what the page shows of the responses of several runs; an example has one response of each run."""
    opening = typical_example(examples)
    further = [example for example in examples if example is not opening]
    return {
        "examples": further[:MAX_EXAMPLES],
        "singles": [],
        "num_left_out": max(0, len(further) - MAX_EXAMPLES),
        "opening": opening,
        "sides": names,
        "timeline": (),
        "strips": [],
    }


def typical_example(examples: Sequence[Example]) -> Example:
    """Return the example with the median change from the first to the last response, in good less poor spans.

    It is chosen among the held-out prompts with two judged responses, else among all prompts with two judged responses.
    Without such prompts it is the first example.
    """
    judged = [example for example in examples if _is_judged_twice(example)]
    if not judged:
        return next(iter(examples), ())
    if judged[0][-1].split == "eval":
        judged = [example for example in judged if example[-1].split == "eval"]
    by_change = sorted(judged, key=_change)
    return by_change[len(by_change) // 2]


def _is_judged_twice(example: Example) -> bool:
    """Return whether an example has usable feedback on its first and on its last response."""
    if len(example) < 2:
        return False
    return all(sample.feedback is not None and sample.feedback.usable for sample in first_and_last(example))


def _change(example: Example) -> int:
    """Return how much good less poor spans rise from the first to the last response."""
    before, after = first_and_last(example)
    return _score(after) - _score(before)


def _score(sample: SampleRecord) -> int:
    assert sample.feedback is not None
    return sum(span.label for span in sample.feedback.spans)


def first_and_last(example: Example) -> Example:
    """Return the first and the last response of an example, or the only one."""
    if len(example) < 2:
        return example
    return example[0], example[-1]
