"""Write a trained model into a folder of its own: merged or as an adapter, with its model card.

    t2g export runs/my-run FOLDER                 # the policy; an adapter is merged into it
    t2g export runs/my-run FOLDER --adapter       # the adapter of a run with learner.lora or sft.lora
    t2g export ADAPTER FOLDER                     # any adapter in the format of peft, merged into its base

The folder has safetensors, config, tokenizer and README.md, and loads with `from_pretrained`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.common.cli import print_outputs, program_name, run_to_exit_code


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("jobs.export_model"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="POLICY", help="a run, a model, or an adapter")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new folder")
    parser.add_argument("--adapter", action="store_true", help="write only the adapter")
    arguments = parser.parse_args(argv)

    def export() -> None:
        from jobs.common.published_model import write_published

        model = write_published(arguments.source, arguments.folder, adapter=arguments.adapter)
        print_outputs(model=model)

    return run_to_exit_code(parser.prog, export)


if __name__ == "__main__":
    sys.exit(main())
