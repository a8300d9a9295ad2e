"""Write report.html of a run of jobs.train_policy again, also while it goes on.

python -m jobs.report --run runs/my-run
"""

import argparse
import sys
from pathlib import Path

from t2g.errors import UserError
from t2g.report.run_page import report_run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.report", description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="the run's folder")
    try:
        print(report_run(parser.parse_args(arguments).run))
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
