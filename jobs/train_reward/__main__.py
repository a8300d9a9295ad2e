"""Train the span reward model on annotated records and measure it on held-out ones.

    python -m jobs.train_reward --config configs/own/reward.yaml model.policy=my/model \
        data.path=runs/own-annotated/train.jsonl eval_data.path=runs/own-annotated/heldout.jsonl

Leaves `<run folder>/model` with span_reward.json in it, metrics.jsonl and reward.json (see
`t2g.study.reward_eval.reward_metrics`). run.smoke=true does the same with three steps in the folder `smoke`.
"""

import sys
from typing import Any

from jobs.common.cli import install_stop_flag, main, print_outputs
from t2g.config import RewardJob


def run(config: RewardJob, data: Any) -> None:
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.run_folder import check_folder
    from jobs.train_reward.reward_models import REWARD_FILE, train_reward
    from jobs.train_sft.supervised import MODEL

    check_folder(config)
    with on_cluster(config), Fleets() as fleets:
        metrics = train_reward(config, data, fleets, tokenizer=data.tokenizer, stop=install_stop_flag())
    figures = [f"{name} {value:.3f}" for name, value in metrics.items()]
    print(" ".join(figures))
    print_outputs(model=config.run.folder / MODEL, numbers=config.run.folder / REWARD_FILE)


if __name__ == "__main__":
    sys.exit(main(RewardJob, run, read="jobs.train_reward.reward_models:read_data"))
