"""Supervised fine-tuning of a policy on references, with DeepSpeed ZeRO-3 under Ray Train.

    python -m jobs.train_sft --config configs/own/sft.yaml model.policy=my/model data.path=my.jsonl

Leaves `<run folder>/model` (safetensors and tokenizer), metrics.jsonl and the resolved config. The same command again
keeps a finished model, and goes on after the last checkpoint of an unfinished one. run.smoke=true makes three steps in
the folder `smoke` and says how long all of them will take.
"""

import sys
from typing import TYPE_CHECKING

from jobs.common.cli import main
from t2g.config import SFTJob

if TYPE_CHECKING:
    from t2g.types import TrainSequence


def read(config: SFTJob) -> "list[TrainSequence]":
    from jobs.common.supervised import read_examples

    return read_examples(config)


def run(config: SFTJob, examples: "list[TrainSequence]") -> None:
    from jobs.common.fleets import on_cluster
    from jobs.common.run_folder import check_folder
    from jobs.common.supervised import LEFTOVERS, supervise

    check_folder(config, *LEFTOVERS)
    with on_cluster(config):
        supervise(config, examples, title="supervised fine-tuning")


if __name__ == "__main__":
    sys.exit(main(SFTJob, run, read=read))
