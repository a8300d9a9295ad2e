"""Push a trained model with its model card to a hub; the repository is private unless you say otherwise.

    t2g push runs/my-run OWNER/NAME               # merged; --dry-run lists the files and sends nothing
    t2g push runs/my-run OWNER/NAME --adapter     # only the adapter of a run with learner.lora or sft.lora

The token is that of HF_TOKEN, or of `hf auth login`. All files appear at once, in one commit,
which deletes files of an earlier push that the new one does not have.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jobs.common.cli import program_name, run_to_exit_code
from t2g.errors import UserError

MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("jobs.push"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="POLICY", help="a run, a model, or an adapter")
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository on the hub")
    parser.add_argument("--adapter", action="store_true", help="push only the adapter")
    parser.add_argument("--base", metavar="OWNER/NAME", help="the adapter's base model, where it was a folder here")
    parser.add_argument("--public", action="store_true", help="everybody may read it")
    parser.add_argument("--hub-url", metavar="URL", help="another hub than huggingface.co")
    parser.add_argument("--dry-run", action="store_true", help="print what would be pushed")
    arguments = parser.parse_args(argv)
    return run_to_exit_code(parser.prog, lambda: push(arguments))


def push(arguments: argparse.Namespace) -> None:
    """Write the model into a temporary folder and push it."""
    from jobs.common.hub import Hub, check_repository, names_repository
    from jobs.common.published_model import find_published, read_base, write_published

    check_repository(arguments.repository)
    folder = find_published(arguments.source, adapter=arguments.adapter)
    if arguments.base is not None:
        if not arguments.adapter:
            raise UserError("--base is the base of an adapter: give --adapter as well")
        check_repository(arguments.base)
    elif arguments.adapter:
        base = read_base(folder)
        if Path(base).exists() or not names_repository(base):
            raise UserError(f"the adapter's base is {base}, which is on no hub; give --base, or leave out --adapter")

    hub = None if arguments.dry_run else Hub.connect(arguments.hub_url)
    with tempfile.TemporaryDirectory() as temporary:
        _, _, name = arguments.repository.partition("/")
        model = Path(temporary) / name
        write_published(arguments.source, model, adapter=arguments.adapter, base=arguments.base)
        visibility = "public" if arguments.public else "private"
        print(f"{arguments.repository}: {visibility}")
        for file in sorted(model.iterdir()):
            print(f"  {file.name}  {file.stat().st_size / MIB:.2f} MiB")
        if hub is None:
            print("nothing was sent")
            return
        address = hub.push(model, arguments.repository, is_public=arguments.public)
        print(f"pushed to {address}")


if __name__ == "__main__":
    sys.exit(main())
