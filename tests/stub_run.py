"""`jobs.train_policy` with engines that answer from a random generator (`stub_engines`); its ranks are real ZeRO-3."""

import sys

from stub_engines import StubRollout

from actors.engines.rollout import RolloutFleet
from jobs.common.cli import main
from jobs.train_policy.policy_job import READ_DATA, run_training
from t2g.config import PolicyJob


def judge(prompt: str, response: str) -> tuple[str, list[tuple[str, int]], list[tuple[str, int]]]:
    """A feedback function: the first character is good."""
    return "the beginning helps", [(response[:1], 1)], []


if __name__ == "__main__":
    RolloutFleet.actor = StubRollout
    sys.exit(main(PolicyJob, run_training, read=READ_DATA))
