"""Train a policy by span-level PPO.

    python -m jobs.train_policy --config configs/own/policy.yaml model.policy=my/model data.path=my.jsonl \
        feedback.source=my_pkg.feedback:judge
"""

import sys

from jobs.common.cli import main
from jobs.train_policy.policy_job import READ_DATA, check_start, run_training
from t2g.config import PolicyJob

if __name__ == "__main__":
    sys.exit(main(PolicyJob, run_training, read=READ_DATA, check=check_start))
