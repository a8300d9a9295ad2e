"""A learner rank that only sends its weights: the policy under ZeRO-3 without optimizer, reference and critic.

For measuring a weight sync on a machine that has no room for the rest.
"""

import ray

from actors.learner import zero3
from actors.learner.learner import LearnerWorker
from actors.learner.models import load_for_training
from actors.learner.parts import LearnerSpec, PolicyPart
from t2g.algo.head import install_chunked_head


class FrozenPolicy(PolicyPart):
    """Announces, streams and scores the probe as every policy does."""

    def __init__(self, spec: LearnerSpec, num_ranks: int) -> None:
        self.spec = spec
        self.tokenizer, (policy,) = load_for_training(
            spec.model, "AutoModelForCausalLM", dtype=spec.learner.dtype, on_gpu=False
        )
        install_chunked_head(policy)
        self.engine = zero3.frozen_engine(policy, dtype=spec.learner.dtype, world_size=num_ranks)


class FrozenWorker(LearnerWorker):
    def start(self, master_addr: str, master_port: int) -> None:
        """Join the group on CPUs, load the policy, partition it."""
        if self._port is not None:
            self._port.close()
        zero3.init_distributed(
            self.rank, self.role.workers, master_addr, master_port, "gloo", timeout_s=self.spec.learner.step_timeout_s
        )
        self.parts["policy"] = FrozenPolicy(self.spec, self.role.workers)


FrozenActor = ray.remote(FrozenWorker)
