"""Train a policy by span-level PPO.

    python -m jobs.train_policy --config configs/own/policy.yaml model.policy=my/model data.path=my.jsonl \
        feedback.source=my_pkg.feedback:judge
"""

import sys

from jobs.api.calls import READ_POLICY_DATA, run_training
from jobs.common.cli import main
from t2g.config import PolicyJob

if __name__ == "__main__":
    sys.exit(main(PolicyJob, run_training, read=READ_POLICY_DATA))
