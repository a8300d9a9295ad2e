"""Fakes of the four seams: a policy that is a table of logits, small enough that PPO on it takes milliseconds.

The policy writes LENGTH letters; the letter at each place is drawn from softmax of that place's logits, whatever the
prompt. `a` is good, `b` is poor, `c` is neither.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from t2g.algo.corrections import importance_weights
from t2g.algo.losses import kl_loss, policy_loss, value_loss
from t2g.data.batching import pack_minibatch
from t2g.feedback.parse import make_feedback, no_feedback
from t2g.interfaces import Sampling
from t2g.sections import SandboxConfig
from t2g.tasks.tiny_assets import build_tokenizer
from t2g.types import Prompt, Rollout, SpanFeedback, TokenStats, TrainBatch, UpdateResult, WeightSyncResult

LETTERS = "abc"
LENGTH = 4


class FakeRollouts:
    """Samples from its own copy of the table: it learns of an update only through a sync."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids = [tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS]
        self.logits = torch.zeros(LENGTH, len(LETTERS))
        self.version = 0
        self.before_sample: Callable[[], None] = lambda: None

    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        self.before_sample()
        logprobs = (self.logits / sampling.temperature).double().log_softmax(-1)
        key = int.from_bytes(prompt.prompt_id.encode())
        rollouts = []
        for index in range(sampling.num_samples):
            rng = np.random.default_rng([sampling.seed, key, index])
            letters = [int(rng.choice(len(LETTERS), p=row.exp().numpy())) for row in logprobs]
            rollouts.append(
                Rollout(
                    prompt_id=prompt.prompt_id,
                    sample_index=index,
                    prompt_ids=prompt.prompt_ids,
                    response_ids=np.array([self.ids[i] for i in letters], np.int32),
                    rollout_logprobs=np.array([float(logprobs[t, i]) for t, i in enumerate(letters)], np.float32),
                    response_text="".join(LETTERS[i] for i in letters),
                    finish_reason="length",
                    policy_versions=((0, LENGTH, self.version),),
                )
            )
        return rollouts


class FakeFeedback:
    name = "program"

    def __init__(self) -> None:
        self.failing: Callable[[Prompt], bool] = lambda prompt: False

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        if self.failing(prompt):
            return no_feedback("failed", source=self.name, version="fake")
        places = {c: [(c, k + 1) for k in range(response_text.count(c))] for c in "ab"}
        return make_feedback("a yes, b no", places["a"], places["b"], response_text, source=self.name, version="fake")


class FakeLearner:
    """Adam on the table and on one value per place."""

    def __init__(self, rollouts: FakeRollouts, *, lr: float = 0.05) -> None:
        self.ids = rollouts.ids
        self.logits = torch.zeros(LENGTH, len(LETTERS), requires_grad=True)
        self.critic = torch.zeros(LENGTH, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits, self.critic], lr=lr)
        self.num_updates = 0
        self.batches: list[TrainBatch] = []  # everything it was trained on

    def _places(self, response_ids: np.ndarray) -> list[int]:
        return [self.ids.index(int(i)) for i in response_ids]

    def forward(self, rollouts: Sequence[Rollout]) -> list[TokenStats]:
        logprobs = self.logits.detach().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1).numpy()
        reference = np.full(LENGTH, -np.log(len(LETTERS)), np.float32)
        return [
            TokenStats(
                old_logprobs=logprobs[range(LENGTH), self._places(r.response_ids)].numpy(),
                ref_logprobs=reference,
                values=self.critic.detach().numpy().copy(),
                entropy=entropy,
            )
            for r in rollouts
        ]

    def update(self, batch: TrainBatch) -> UpdateResult:
        self.batches.append(batch)
        for minibatch in batch.minibatches:
            (microbatch,) = pack_minibatch(minibatch, num_ranks=1, token_budget=10_000)[0]
            response = microbatch.weights > 0
            place = torch.arange(LENGTH).repeat(len(minibatch.samples))
            given = {
                name: torch.from_numpy(getattr(microbatch, name)[response])
                for name in ("advantages", "returns", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs",
                             "segment_ids", "weights")
            }  # fmt: skip
            old, weights = given["old_logprobs"], given["weights"]
            logprobs = self.logits.log_softmax(-1)[place, self._places(microbatch.input_ids[response])]
            correction = importance_weights(old, given["rollout_logprobs"], given["segment_ids"], weights, "token", 2.0)
            policy, _ = policy_loss(
                logprobs=logprobs,
                old_logprobs=old,
                importance_weights=correction,
                advantages=given["advantages"],
                weights=weights,
                clip_eps=0.2,
            )
            kl, _ = kl_loss(logprobs=logprobs, ref_logprobs=given["ref_logprobs"], weights=weights)
            critic, _ = value_loss(
                values=self.critic[place],
                old_values=given["values"],
                returns=given["returns"],
                weights=weights,
                value_clip=0.2,
            )
            loss = policy + batch.kl_coef * kl + critic
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.num_updates += 1
        return UpdateResult(policy_version=self.num_updates, metrics={"policy/loss": float(loss.detach())})

    def save(self, folder: Path) -> None:
        state = {"table": [self.logits, self.critic], "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "num_updates": self.num_updates}, folder / "fake.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "fake.pt", weights_only=True)
        with torch.no_grad():
            self.logits.copy_(state["table"][0])
            self.critic.copy_(state["table"][1])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]

    def export(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "policy.json").write_text(json.dumps(self.logits.tolist()))


class FakeSync:
    def __init__(self, learner: FakeLearner, rollouts: FakeRollouts) -> None:
        self.learner, self.rollouts = learner, rollouts

    def push(self, policy_version: int) -> WeightSyncResult:
        self.rollouts.logits = self.learner.logits.detach().clone()
        self.rollouts.version = policy_version
        return WeightSyncResult(policy_version=policy_version, seconds=0.0, bytes=48, probe_gap=0.0)


class LetterTask:
    """Scored by the share of `a`."""

    name = "letters"
    can_cut = False
    score_name = "share_a"
    step_pattern = "c"
    unit = 1.0

    def __init__(self) -> None:
        self.unmeasured: set[str] = set()  # prompts without a reference
        self.on_measure: Callable[[str], None] = lambda prompt_id: None
        self.sandboxes: list[SandboxConfig] = []  # that were asked for

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        self.on_measure(prompt.prompt_id)
        self.sandboxes.append(sandbox)
        if prompt.prompt_id in self.unmeasured:
            return None
        return {"share_a": self.unit * response_text.count("a") / LENGTH}


def letter_tokenizer(folder: Path) -> Any:
    return build_tokenizer(folder, [LETTERS], vocab_size=261)


def letter_prompts(count: int, prefix: str = "p") -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{prefix}{i}", prompt_ids=np.array([7], np.int32), prompt_text="write", task="letters")
        for i in range(count)
    ]
