"""Every job behind one word: `t2g train --config FILE ...` is `python -m jobs.train_policy --config FILE ...`.

t2g init my-run        prompts, a critic, a config and a README that run
t2g --version
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from runpy import run_module

NAMES = {"train": "train_policy", "sft": "train_sft", "reward": "train_reward"}
OTHERS = (
    "annotate", "benchmark", "compare", "demo", "deploy", "evaluate", "gpu_check", "mark", "report", "score", "serve",
)  # fmt: skip
MODULES = NAMES | {name: name for name in OTHERS}
HERE = Path(__file__).parent
DEMO = HERE.parent / "configs" / "tiny" / "demo.yaml"  # beside jobs in a checkout and in a wheel
STARTER = HERE / "starter"


def init(folder: Path) -> int:
    """A folder that runs; exit code 2 for one that holds something."""
    if folder.exists() and any(folder.iterdir()):
        print(f"t2g init: {folder} is not empty; name another folder", file=sys.stderr)
        return 2
    shutil.copytree(STARTER, folder, ignore=shutil.ignore_patterns("__*"), dirs_exist_ok=True)
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}; README.md says how to go on")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="t2g", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"t2g {version('t2g')}")
    parser.add_argument("job", choices=["init", *MODULES], help="`t2g JOB --help` says more")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="the job's own; of init a folder")
    given = parser.parse_args(argv)
    rest = list(given.rest)
    if given.job == "init":
        if len(rest) != 1 or rest[0].startswith("-"):
            parser.error("init needs one folder: t2g init my-run")
        return init(Path(rest[0]))
    if given.job == "demo" and "--config" not in rest:
        rest = ["--config", str(DEMO), *rest]
    sys.argv[1:] = rest
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a critic beside the config is found
    run_module(f"jobs.{MODULES[given.job]}", run_name="__main__", alter_sys=True)  # which ends the process
    return 0


if __name__ == "__main__":
    sys.exit(main())
