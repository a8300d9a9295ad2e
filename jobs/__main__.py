"""Run every job by one command: `t2g train --config FILE ...` is `python -m jobs.train_policy --config FILE ...`."""

import argparse
import ast
import os
import shutil
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from runpy import run_module

SECTIONS = {
    "Start": ("init", "demo"),
    "Feedback": ("annotate", "mark", "reward", "score"),
    "Training": ("sft", "train", "compare"),
    "Results": ("evaluate", "report", "serve", "export", "push"),
    "Machines": ("doctor", "deploy", "benchmark", "gpu_check"),
}
NAMES = {"train": "train_policy", "sft": "train_sft", "reward": "train_reward", "export": "export_model"}
JOBS = tuple(chain.from_iterable(SECTIONS.values()))
MODULES = {name: NAMES.get(name, name) for name in JOBS if name != "init"}
JOBS_FOLDER = Path(__file__).parent
STARTER = JOBS_FOLDER / "starter"
TEMPLATES = ("feedback", "repair", "tools")


def init(folder: Path, template: str = "feedback") -> int:
    """Write an example folder; return exit code 2 if the folder is not empty, or cannot be written."""
    source = STARTER if template == TEMPLATES[0] else STARTER / template
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            print(f"t2g init: {folder} is not an empty folder; name another one", file=sys.stderr)
            return 2
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__*", *TEMPLATES), dirs_exist_ok=True)
    except OSError as error:
        print(f"t2g init: {folder} cannot be written: {error.strerror or error}; name another one", file=sys.stderr)
        return 2
    names = sorted(file.name for file in folder.iterdir())
    print(f"{folder}: {', '.join(names)}; README.md says how to go on")
    return 0


def purpose_of(job: str) -> str:
    """Return the summary line of a job's docstring, without an import of what the job needs."""
    if job == "init":
        return "Write a folder with prompts, a feedback function and a config that run: t2g init my-run"
    package = JOBS_FOLDER / MODULES[job] / "__main__.py"
    file = package if package.is_file() else JOBS_FOLDER / f"{MODULES[job]}.py"
    source = file.read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    return doc.partition("\n")[0]


def format_jobs() -> str:
    """Return every job with its purpose, a line each, by section."""
    lines: list[str] = []
    for title, names in SECTIONS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<10} {purpose_of(name)}" for name in names]
        lines.append("")
    return "\n".join([*lines, "t2g JOB --help lists the options and keys of a job."])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="t2g", description=format_jobs(), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"t2g {version('t2g')}")
    parser.add_argument("job", nargs="?", metavar="JOB", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.job is None:
        print(format_jobs())
        return 0
    jobs = ["init", *MODULES]
    if arguments.job not in jobs:
        near = get_close_matches(arguments.job, jobs, n=1)
        hint = f"did you mean {near[0]}?" if near else "t2g lists them"
        parser.error(f"{arguments.job} is no job; {hint}")
    if arguments.job == "init":
        init_parser = argparse.ArgumentParser(prog="t2g init", description=purpose_of("init"))
        init_parser.add_argument("folder", type=Path, metavar="FOLDER")
        templates = (
            "feedback: prompts and a function that judges; repair: logged conversations, replies as critiques; tools: "
            "conversations with tools"
        )
        init_parser.add_argument("--template", choices=TEMPLATES, default=TEMPLATES[0], help=templates)
        init_arguments = init_parser.parse_args(arguments.rest)
        return init(init_arguments.folder, init_arguments.template)
    sys.argv[1:] = arguments.rest
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a feedback function beside the config is found
    run_module(f"jobs.{MODULES[arguments.job]}", run_name="__main__", alter_sys=True)  # the module calls sys.exit
    return 0


if __name__ == "__main__":
    sys.exit(main())
