"""The settings of a learner's ranks, and the values derived from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from t2g.config import LearnerConfig, ModelConfig, ObjectiveConfig
from t2g.data.batching import Plan, plan_microbatches
from t2g.data.shared_prompts import plan_shared_prompts
from t2g.types import TokenSequence

Loss = Literal["ppo", "supervised", "dpo", "none"]
NO_CRITIC = ObjectiveConfig(advantages="group", whiten="none")


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """The settings of every rank."""

    model: ModelConfig
    learner: LearnerConfig
    objective: ObjectiveConfig = NO_CRITIC  # objective of PPO
    loss: Loss = "ppo"  # loss of the policy; none: it has no optimizer and only sends its weights
    temperature: float = 1.0  # sampling temperature: the policy is softmax(logits / temperature)
    num_updates: int  # calls of `update` in the learning-rate schedules
    seed: int
    dropout: float = 0.0  # dropout of adapters; under the supervised loss the model keeps its own dropout as well
    longest_row: int = 0  # see `load_for_training`

    @property
    def warmup_updates(self) -> int:
        """Return the number of first updates that train only the critic."""
        return self.learner.critic_warmup_steps if self.objective.uses_critic else 0

    @property
    def defers_old_logprobs(self) -> bool:
        """Return whether the old logprobs can be computed in the forward pass of the update itself.

        It needs an update of one step, no critic, no teacher, and the KL as a term of the loss.
        """
        objective = self.objective
        needs_logprobs = objective.uses_critic or not objective.kl_in_loss or objective.teacher is not None
        return self.loss == "ppo" and not needs_logprobs and self.minibatches_per_update == 1

    @property
    def stats_fields(self) -> frozenset[str]:
        """Return the fields of `TokenStats` that are needed before an update."""
        if self.loss != "ppo":
            return frozenset({"ref_logprobs"})
        fields = {"ref_logprobs"}
        if self.objective.uses_critic:
            fields.add("values")
        if self.objective.distillation:
            fields.add("top_ids")
        if not self.defers_old_logprobs:
            fields |= {"old_logprobs", "entropy"}
        return frozenset(fields)

    @property
    def minibatches_per_update(self) -> int:
        if self.loss != "ppo":
            return 1
        return self.learner.num_epochs * self.learner.minibatches_per_epoch

    def plan(self, sequences: Sequence[TokenSequence], num_ranks: int) -> Plan:
        """Return the microbatches of each rank; a pair of DPO stays together."""
        options = {"num_ranks": num_ranks, "token_budget": self.learner.tokens_per_microbatch}
        if self.learner.share_prompts and self.loss != "dpo":
            return plan_shared_prompts(sequences, **options)
        group_size = 2 if self.loss == "dpo" else 1
        return plan_microbatches(sequences, group_size=group_size, **options)
