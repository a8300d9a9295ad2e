"""Serve a page on which a person marks spans of responses and writes critiques.

    t2g mark my.jsonl --by ann

DATA: a file with prompts and responses, as jobs.annotate reads it, samples.jsonl of a run too. All marks are in
my.marks/ann/journal.jsonl at once: stop at any time, start again to go on. my.marks/ann/annotated.jsonl has the records
of what is finished, for data.path of jobs.train_reward or, with annotate.source=human, of jobs.annotate, which splits
them. Another person marks under another name in the same folder; the page says how far the two agree, and
'data.path=[my.marks/ann/annotated.jsonl,my.marks/bob/annotated.jsonl]' gives both to jobs.annotate. It is served on
127.0.0.1 alone: from another machine take --port and ssh -L PORT:127.0.0.1:PORT.
"""

import argparse
import re
import sys
from contextlib import closing
from pathlib import Path

from jobs.common.cli import install_stop_flag, print_outputs, program_name, run_to_exit_code
from jobs.common.printable_log import to_printable
from jobs.common.run_folder import sole_process
from t2g.config import DataConfig
from t2g.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("jobs.mark"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--by", type=_name, required=True, metavar="NAME", help="who marks")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="by default the data's name, ending in .marks")
    parser.add_argument("--task", default="prompts", help="whose names the data's fields have")
    parser.add_argument("--port", type=int, default=0, help="by default a free one")
    options = parser.parse_args(arguments)
    folder = options.out or options.data.with_suffix(".marks")
    return run_to_exit_code(parser.prog, lambda: serve(options.data, folder, options.by, options.task, options.port))


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w-]{1,40}", text):
        raise argparse.ArgumentTypeError(f"{text!r} becomes a folder's name: letters, digits, - and _ alone")
    return text


def serve(data: Path, folder: Path, by: str, task: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from t2g.data.load import load_records
    from t2g.loop.annotation import make_samples
    from t2g.marking.mark_server import MarkServer
    from t2g.marking.marks import RECORDS_FILE, Marks
    from t2g.tasks.base import get_task

    if not data.is_file():
        raise UserError(f"{data}: there is no such file")
    records = load_records(DataConfig(path=str(data)))
    samples = make_samples(records, get_task(task))
    with sole_process(folder / by), closing(Marks(folder, by, samples)) as marks, MarkServer(marks, port) as server:
        stop = install_stop_flag()
        lacking = [sample.problem for sample in samples if sample.problem]
        if lacking:
            print(to_printable(f"{len(lacking)} of {len(samples)} records have nothing to mark; {lacking[0]}"))
        print(f"{sum(marks.finished)} of {len(marks.finished)} responses are marked; go on at {server.url}", flush=True)
        while not stop:
            server.handle_request()
        print(f"{sum(marks.finished)} of {len(marks.finished)} responses are marked")
        for message in marks.agreement_messages():
            print(message)
        print_outputs(records=folder / by / RECORDS_FILE)


if __name__ == "__main__":
    sys.exit(main())
