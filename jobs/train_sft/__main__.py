"""Fine-tune a policy on references, with DeepSpeed ZeRO-3 under Ray Train.

    python -m jobs.train_sft --config configs/own/sft.yaml model.policy=my/model data.path=my.jsonl

Leaves `<run folder>/model` (safetensors and tokenizer), metrics.jsonl and the resolved config. The same command again
keeps a finished model, and goes on after the last checkpoint of an unfinished one. run.smoke=true makes three steps in
the folder `smoke` and says how long all of them will take.
"""

import sys
from typing import Any

from jobs.common.cli import install_stop_flag, main, print_outputs
from t2g.config import SFTJob


def run(config: SFTJob, examples: Any) -> None:
    from jobs.common.fleets import on_cluster
    from jobs.common.run_folder import check_folder
    from jobs.train_sft.supervised import MODEL, train_supervised
    from t2g.runs.log import METRICS_FILE

    check_folder(config)
    with on_cluster(config):
        train_supervised(config, examples, title="supervised fine-tuning", stop=install_stop_flag())
    print_outputs(model=config.run.folder / MODEL, numbers=config.run.folder / METRICS_FILE)


if __name__ == "__main__":
    sys.exit(main(SFTJob, run, read="jobs.train_sft.supervised:read_examples"))
