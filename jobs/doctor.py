"""Print what this machine has, and every problem that would stop or slow down a run.

    t2g doctor

Versions and their requirements, CPU, GPUs, memory, shared memory, open files, disk, ports, proxies. Exit code 2: a run
would fail. Nothing is started or written. `t2g deploy doctor` checks a cluster.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.common.cli import program_name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("jobs.doctor"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    arguments = parser.parse_args(argv)
    from t2g.resources.machine import check_machine

    checks = check_machine(arguments.folder, os.environ)
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.verdict:<5}  {check.name:<{width}}  {check.value}")
        if check.advice:
            print(f"{'':<7}{'':<{width}}  {check.advice}")
    is_wrong = any(check.verdict == "wrong" for check in checks)
    return 2 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
