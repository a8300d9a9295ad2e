"""Measure the peak memory of one real rank: `python tests/rank_memory.py MODEL '{"tokens_per_microbatch": 512}' ROW`.

It makes the passes of two updates of PPO, with two full microbatches, and prints GiB. A sequence has ROW tokens, half
of them in its prompt. With share_prompts a microbatch has one prompt.
"""

import json
import socket
import sys
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np

from actors.learner import learner
from t2g.config import LearnerConfig, ModelConfig, ObjectiveConfig
from t2g.types import TrainSample


def make_microbatch(rng: np.random.Generator, config: LearnerConfig, row: int) -> list[TrainSample]:
    """Return the samples that fill a microbatch; a prompt and a response have half a row each."""
    half = row // 2
    number = max(1, config.tokens_per_microbatch // row)
    if config.share_prompts:
        number = max(1, config.tokens_per_microbatch // half - 1)
    weight = 1 / (number * row)
    prompts = rng.integers(5, 300, (number, half))
    if config.share_prompts:
        prompts[:] = prompts[0]
    return [make_sample(rng, prompt_ids, half, weight) for prompt_ids in prompts]


def make_sample(rng: np.random.Generator, prompt_ids: np.ndarray, half: int, weight: float) -> TrainSample:
    response_ids = rng.integers(5, 300, half)
    names = ("advantages", "returns", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    numbers: dict[str, Any] = dict.fromkeys(names, np.full(half, -5.0, np.float32))
    weights = np.full(half, weight, np.float32)
    return TrainSample(prompt_ids=prompt_ids, response_ids=response_ids, weights=weights, **numbers)


def measure(model: str, config: LearnerConfig, row: int) -> float:
    """Return the peak of this process after an update of two optimizer steps, GiB."""
    spec = learner.LearnerSpec(
        model=ModelConfig(policy=model), learner=config, objective=ObjectiveConfig(), num_updates=2, seed=1
    )
    rank = learner.LearnerWorker(spec, ["policy"], config, 0)
    learner.listening_environment = lambda environment: {}  # no Ray, which knows the address
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    rank.start(address)
    rng = np.random.default_rng(1)
    share = [make_microbatch(rng, config, row) for _ in range(2)]
    rank.forward("policy", [share], spec.stats_fields)
    rank.update("policy", [share, share], 0.05, "measured")
    return getrusage(RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    print(measure(sys.argv[1], LearnerConfig(**json.loads(sys.argv[2])), int(sys.argv[3])))
