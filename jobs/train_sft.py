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

TITLE = "supervised fine-tuning"


def read_examples(config: SFTJob) -> "list[TrainSequence]":
    """What the job learns from, read before any process is started. UserError for what cannot be used."""
    from t2g.data.load import load_records
    from t2g.feedback.examples import policy_examples
    from t2g.tasks.base import get_task
    from t2g.text.tokenizer import load_tokenizer

    task, tokenizer = get_task(config.task), load_tokenizer(config.model.policy, config.model.revision)
    return policy_examples(load_records(config.data), task, tokenizer, max_length=config.sft.max_length)


def run(config: SFTJob) -> None:
    from jobs.common.fleets import on_cluster
    from jobs.common.run_folder import check_folder
    from jobs.common.supervised import LEFTOVERS, supervise

    check_folder(config, *LEFTOVERS)
    examples = read_examples(config)
    with on_cluster(config):
        supervise(config, examples, title=TITLE)


if __name__ == "__main__":
    sys.exit(main(SFTJob, run))
