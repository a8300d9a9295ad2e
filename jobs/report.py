"""Write the report of a run again, also while it goes on, or of several runs side by side.

t2g report runs/my-run
t2g report runs/my-run runs/another        # into runs/my-run/report_beside.html
"""

import argparse
import sys
from pathlib import Path

from jobs.common.cli import print_outputs, program_name, run_to_exit_code
from t2g.report.run_page import find_run, report_beside, report_run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program_name("jobs.report"), description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    options = parser.parse_args(arguments)
    named = list(dict.fromkeys(options.runs))

    def write() -> None:
        folders = [find_run(folder) for folder in named]
        report = report_run(folders[0]) if len(folders) == 1 else report_beside(folders)
        print_outputs(report=report)

    return run_to_exit_code(parser.prog, write)


if __name__ == "__main__":
    sys.exit(main())
