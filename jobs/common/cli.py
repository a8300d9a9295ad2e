"""The command line that every job shares: `python -m jobs.X --config FILE [--dry-run] [key=value ...]`.

    if __name__ == "__main__":
        sys.exit(main(PolicyJob, run))

Exit codes: 0 done, 2 an error that the user can fix, 3 the run stopped itself, 130 interrupted, 143 terminated.
Imports nothing heavy.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ValidationError

from jobs.common.printable_log import make_log_printable, to_printable
from jobs.common.unknown_options import describe_unknown
from t2g.config import AnyJob, loading
from t2g.config.validation_errors import format_errors, section_type
from t2g.errors import RunStopped, Stopped, UserError
from t2g.files import describe_write_failure

STDERR = 2  # its file descriptor
Config = TypeVar("Config", bound=AnyJob)
Result = TypeVar("Result")


def main(
    schema: type[Config],
    run: Callable[..., Any],
    describe: Callable[[Config], str] = AnyJob.describe,
    argv: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] = {},
    read: str | None = None,
    of_run: Callable[[Path], Mapping[str, Any]] | None = None,
    default_file: Path | None = None,
    check: Callable[[Config], None] | None = None,
) -> int:
    """Read the config and the inputs, report everything that would stop the job, then run it; return the exit code.

    With --dry-run print `describe(config)` in place of running. With --show-config print the resolved config alone.

    Args:
        run: The job, called as `run(config)`, or with `read` as `run(config, data)`. A number that it returns is the
            exit code.
        argv: Arguments without the program's name; None for those of this process.
        options: Further options of this job for argparse, {"--text": {"required": True}}; `run` gets them by name.
        read: "pkg.mod:function", which may be heavy to import. It reads all inputs of the config before any process is
            started, and raises UserError. `data` is None if an earlier phase of the job still has to make the inputs.
        of_run: Returns the values of the config from the folder of a run, which may then stand in place of --config.
        default_file: Config file without --config; None: a file is required.
        check: Refuses folders that the job continues and that were made with other inputs; by default the run folder.
    """

    parser = job_parser(schema, options, takes_run=of_run is not None, default_file=default_file)
    arguments = _parse(parser, schema, sys.argv[1:] if argv is None else argv)
    file = arguments.pop("config")
    overrides = arguments.pop("overrides")
    dry_run = arguments.pop("dry_run")
    show_config = arguments.pop("show_config")
    run_folder = find_run_folder(overrides) if of_run else None
    if (file is None) == (run_folder is None):
        parser.error("needs either the folder of a run or --config FILE")

    def execute() -> int:
        values = of_run(Path(run_folder)) if of_run and run_folder else file
        keys = [text for text in overrides if text != run_folder]
        config = loading.load(schema, values, keys, find_resources=find_resources)
        if show_config:
            print(loading.to_yaml(config), end="")
            return 0
        checked = check_job(config, read, check, describe if dry_run else None)
        if dry_run:
            print("nothing was found that would stop the job")
            return 0
        result = run_checked(checked, partial(run, **arguments))
        return result if isinstance(result, int) else 0

    return run_to_exit_code(parser.prog, execute)


def _parse(parser: argparse.ArgumentParser, schema: type[AnyJob], argv: Sequence[str]) -> dict[str, Any]:
    """Return the values of the options and the overrides; an unknown option ends the process with a sentence."""
    known, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(describe_unknown(schema, unknown, argv))
    return vars(known)


class CheckedJob(NamedTuple):
    """A job in which nothing was found that would stop it."""

    config: Any  # with estimated memory
    inputs: list[Any]  # what `read` returned; [] for a job that reads nothing


def run_checked(checked: CheckedJob, run: Callable[..., Result]) -> Result:
    """Run the job, whose run folder is copied to `run.mirror` meanwhile."""
    config = checked.config
    with ExitStack() as opened:
        opened.enter_context(config_errors(config))
        if config.run.mirror_url:
            mirroring = import_module("jobs.common.mirroring")  # heavy
            opened.enter_context(mirroring.mirror_run_folder(config))
        return run(config, *checked.inputs)


def check_job(config: AnyJob, read: str | None, check: Any = None, describe: Any = None) -> CheckedJob:
    """Read the inputs, and report everything that would stop the job.

    Args:
        read: See `main`.
        check: See `main`.
        describe: See `main`; for a dry run, which prints the description.

    Raises:
        UserError: Something would stop the job.
    """
    cluster = config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    preflight = import_module("t2g.resources.preflight")  # heavy: --help answers without it
    config = import_module("t2g.resources.job_memory").with_estimated_memory(config)
    resources = find_resources(cluster) if cluster == "local" else None
    findings = preflight.preflight(config, resources)
    inputs = [preflight.read_inputs(findings, config, resolve_name(read))] if read else []
    if describe and (description := findings.collect(describe, config)):
        print(description, flush=True)
    if describe and inputs and inputs[0] is not None:
        preview = import_module("jobs.common.preview").preview_data(config, inputs[0])
        print(preview, end="\n" if preview else "", flush=True)
    findings.refuse()
    check = check or import_module("jobs.common.run_folder").check_own_folder  # heavy
    check(config)
    return CheckedJob(config, inputs)


@contextmanager
def config_errors(config: AnyJob) -> Iterator[None]:
    """Raise UserError for a config that the job makes from its own within the block, and that is invalid."""
    try:
        yield
    except ValidationError as error:
        raise UserError("\n".join(format_errors(type(config), error))) from error


def run_to_exit_code(prog: str, run: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Return the exit code of `run`, whose errors are printed after the name of the program.

    Args:
        interrupted: Message after a Ctrl-C.
    """
    make_log_printable()
    try:
        return run() or 0
    except (UserError, RunStopped) as error:
        # An error that crossed a Ray actor carries the remote traceback in its own text, and the original as `cause`.
        sentence = to_printable(str(getattr(error, "cause", error)))  # it may quote data
        print(f"{prog}: {sentence}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3
    except OSError as error:
        if not (reason := describe_write_failure(error)):
            raise
        file = getattr(error, "filename", None) or "a file"
        print(to_printable(f"{prog}: {file}: {reason}"), file=sys.stderr)
        return 2
    except Stopped:
        name = str(StopFlag.installed.signal_name)
        advice = ": the same command goes on from here" if StopFlag.installed.saves_work else ""
        print(f"stopped by {name}{advice}", file=sys.stderr)
        return 128 + signal.Signals[name]
    except KeyboardInterrupt:
        print(f"{prog}: {interrupted}", file=sys.stderr)
        return 130


def print_outputs(**paths: Path) -> None:
    """Print the outputs of a job by their labels, as the last line of a finished job.

    >>> print_outputs(report=Path("/"), policy=Path("/nowhere"))
    made: report /
    """
    outputs = [f"{label} {path}" for label, path in paths.items() if path.exists()]
    print(f"made: {', '.join(outputs) or 'nothing'}")


def find_resources(address: str | None) -> Mapping[str, float]:
    """Return the resources of a cluster, or of this machine, see `placement.resources`."""
    return import_module("actors.cluster.placement").resources(address)  # heavy


class StopFlag:
    """A flag that SIGTERM or SIGINT sets.

    A loop checks it between steps: `if stop: checkpoint, raise Stopped`, which becomes the shell's exit code of the
    signal, 143 for SIGTERM.
    """

    installed: ClassVar[Self]  # the flag that this process's signal handlers set

    def __init__(self, *, saves_work: bool = True) -> None:
        """Start unset. saves_work: the job keeps its finished work, for messages."""
        self.saves_work = saves_work
        self.signal_name: str | None = None
        self.is_read = False  # whether a job in another thread checks it

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: set the flag, and answer on stderr."""
        # No lock here: a handler that takes one, as threading.Event or print do, may wait for what it interrupted.
        self.signal_name = signal.Signals(number).name
        when = " as soon as its finished work is saved" if self.saves_work else ""
        answer = f"\n{self.signal_name}: the job stops{when}"
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C saves nothing
            answer += "; after a second Ctrl-C it waits only for a learner call or a write that is running"
        with suppress(OSError):  # stderr is closed
            os.write(STDERR, f"{answer}\n".encode())


def install_stop_flag(*, saves_work: bool = True) -> StopFlag:
    """Install the signal handlers and return their flag. Call it after `ray.init`, which sets its own handler.

    Only the main thread can have handlers. In another one, return the flag that the caller of the job sets.
    """
    if threading.current_thread() is not threading.main_thread():
        StopFlag.installed.is_read = True
        return StopFlag.installed
    flag = StopFlag.installed = StopFlag(saves_work=saves_work)
    signal.signal(signal.SIGTERM, flag.on_signal)
    signal.signal(signal.SIGINT, flag.on_signal)
    return flag


def find_run_folder(arguments: Sequence[str]) -> str | None:
    """Return the first argument that is neither an option nor key=value: the folder of a run."""
    for text in arguments:
        if "=" not in text and not text.startswith("-"):
            return text
    return None


def job_parser(
    schema: type[BaseModel],
    options: Mapping[str, Mapping[str, Any]] = {},
    *,
    takes_run: bool = False,
    default_file: Path | None = None,
) -> argparse.ArgumentParser:
    """Return the parser of a job. The schema's docstring begins with it: "jobs.train_policy: span-level PPO."."""
    doc = " ".join((schema.__doc__ or "").split())
    name, _, purpose = doc.partition(": ")
    keys = "\n".join(_section_help(schema))
    parser = argparse.ArgumentParser(
        prog=program_name(name),
        description=purpose,
        epilog=f"keys, with their defaults:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    about_file = "YAML file with the config"
    if default_file is not None:
        about_file += ", by default %(default)s"
    is_file_required = not takes_run and default_file is None
    parser.add_argument(
        "--config", type=Path, default=default_file, required=is_file_required, metavar="FILE", help=about_file
    )
    parser.add_argument("--dry-run", action="store_true", help="print what the job would do and what would stop it")
    parser.add_argument("--show-config", action="store_true", help="print the resolved config as YAML, nothing else")

    metavar = "key=value"
    meaning = "override a key of the file: rollout.temperature=0.6"
    if takes_run:
        metavar = f"RUN {metavar}"
        meaning += "; RUN, in place of --config: the folder of a run, such as runs/my-run"
    parser.add_argument("overrides", nargs="*", metavar=metavar, help=meaning)
    for option, about in options.items():
        parser.add_argument(option, **about)
    return parser


def program_name(module: str) -> str:
    """Return the command as the user typed it: "t2g train" or "python -m jobs.train_policy"."""
    program, *arguments = sys.orig_argv[1:3] or [""]
    if Path(program).name == "t2g" and arguments:
        return f"t2g {arguments[0]}"
    return f"python -m {module}"


def _section_help(
    section: type[BaseModel], prefix: str = "", values: BaseModel | None = None, purpose: str = ""
) -> list[str]:
    """Return a header and a line for every key with its default and meaning, then the same of inner sections.

    Args:
        values: The default value of the section, if any; it may differ from the section's own defaults.
        purpose: Purpose of the section, for its header.
    """
    plain: list[str] = []
    inner: list[str] = []
    for name, info in section.model_fields.items():
        default = getattr(values, name) if values else info.get_default(call_default_factory=True, validated_data={})
        nested = section_type(info.annotation)
        if nested is None:
            is_required = info.is_required() and not values
            default_text = "required" if is_required else json.dumps(default, default=str)
            line = f"  {prefix + name:<38} {default_text:<16} {info.description or ''}"
            plain.append(line.rstrip())
            continue
        nested_purpose = info.description or _first_line(nested)
        if default is None and not info.is_required():
            nested_purpose += " (off by default)"
        nested_default = default if isinstance(default, nested) else None
        inner += _section_help(nested, f"{prefix}{name}.", nested_default, nested_purpose)
    if not plain:
        return inner
    title = prefix.removesuffix(".") or "the job"
    header = f"\n{title}: {purpose}".rstrip(" ")
    return [header, *plain, *inner]


def _first_line(section: type[BaseModel]) -> str:
    """Return the first line of a section's own docstring; "" without one."""
    doc = section.__dict__.get("__doc__") or ""
    return doc.strip().partition("\n")[0]
