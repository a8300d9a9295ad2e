"""Fakes of the four seams: a policy that is a table of logits, small enough that PPO on it takes milliseconds.

The policy writes LENGTH letters; the letter at each place is drawn from softmax of that place's logits, whatever the
prompt. `a` is good, `b` is poor, `c` is neither.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from t2g.algo.corrections import importance_weights
from t2g.algo.logprobs import Rows
from t2g.algo.losses import kl_loss, policy_loss, value_loss
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.files import describe_file
from t2g.interfaces import FeedbackSource, Sampling
from t2g.sandbox import SandboxConfig
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.types import Prompt, Rollout, SpanFeedback, TokenStats, TrainBatch, UpdateResult, WeightSyncResult

LETTERS = "abc"
LENGTH = 4


async def no_wait(prompt_id: str, seed: int) -> None:
    await asyncio.sleep(0)


class FakeRollouts:
    """Samples from its own copy of the table: it learns of an update only through a sync."""

    is_ready = True  # as a fleet whose engines have started

    def __init__(self, tokenizer: Any) -> None:
        self.ids = [tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS]
        self.logits = torch.zeros(LENGTH, len(LETTERS))
        self.version = 0
        self.before_sample: Callable[[Prompt], None] = lambda prompt: None
        self.midway: Callable[[str, int], Awaitable[None]] = (
            no_wait  # between the first half of a response and the other
        )
        self.num_running = 0
        self.requests: list[tuple[str, int]] = []  # prompt_id and seed of every request
        self.answered: list[tuple[str, int]] = []

    async def sample(self, prompt: Prompt, sampling: Sampling, on_rollout: Any = None) -> list[Rollout]:
        self.requests.append((prompt.prompt_id, sampling.seed))
        self.before_sample(prompt)
        self.num_running += 1
        try:
            rollouts = await self._sample(prompt, sampling)
        finally:
            self.num_running -= 1
        self.answered.append((prompt.prompt_id, sampling.seed))
        return rollouts

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        key = int.from_bytes(prompt.prompt_id.encode())
        rngs = [np.random.default_rng([sampling.seed, key, index]) for index in range(sampling.num_samples)]
        letters = []  # by place
        logprobs = []
        versions = []
        for place in range(LENGTH):
            if place == LENGTH // 2:
                await self.midway(prompt.prompt_id, sampling.seed)
            row = (self.logits[place] / sampling.temperature).double().log_softmax(-1).numpy()
            letters.append([int(rng.choice(len(LETTERS), p=np.exp(row))) for rng in rngs])
            logprobs.append([float(row[i]) for i in letters[-1]])
            versions.append(self.version)
        policy_versions = tuple((t, t + 1, version) for t, version in enumerate(versions))
        rollouts = []
        for index in range(sampling.num_samples):
            own_letters = [row[index] for row in letters]
            own_logprobs = [row[index] for row in logprobs]
            response_ids = [self.ids[letter] for letter in own_letters]
            text = "".join(LETTERS[letter] for letter in own_letters)
            rollout = Rollout(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                prompt_ids=prompt.prompt_ids,
                response_ids=np.array(response_ids, np.int32),
                rollout_logprobs=np.array(own_logprobs, np.float32),
                response_text=text,
                finish_reason="length",
                policy_versions=policy_versions,
            )
            rollouts.append(rollout)
        return rollouts


class FakeFeedback(FeedbackSource):
    name = "program"
    version = "fake"

    def __init__(self) -> None:
        self.failing: Callable[[Prompt], bool] = lambda prompt: False
        self.before_judge: Callable[[Prompt], None] = lambda prompt: None
        self.silent: Callable[[Prompt], bool] = lambda prompt: False  # every response earns 0

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.before_judge(prompt)
        if self.failing(prompt):
            return make_failed_feedback("failed", source=self.name, version="fake")
        if self.silent(prompt):
            return make_feedback("nothing", [], [], response_text, source=self.name, version="fake")
        good = [("a", k + 1) for k in range(response_text.count("a"))]
        poor = [("b", k + 1) for k in range(response_text.count("b"))]
        return make_feedback("a yes, b no", good, poor, response_text, source=self.name, version="fake")


class FakeLearner:
    """Adam on the table and on one value per place. Like ranks, it is out of step for good when two calls overlap."""

    def __init__(self, rollouts: FakeRollouts, *, lr: float = 0.05) -> None:
        self.ids = rollouts.ids
        self.logits = torch.zeros(LENGTH, len(LETTERS), requires_grad=True)
        self.critic = torch.zeros(LENGTH, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits, self.critic], lr=lr)
        self.num_updates = 0
        self.batches: list[TrainBatch] = []  # everything it was trained on
        self.seen: list[list[Rollout]] = []  # of each step, what it was asked about
        self.before_call: Callable[[str], None] = lambda call: None
        self._busy = threading.Lock()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        assert self._busy.acquire(blocking=False), f"{name} during another call"
        try:
            self.before_call(name)
            yield
        finally:
            self._busy.release()

    def score_teacher(self, queries: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    def _places(self, response_ids: np.ndarray) -> list[int]:
        return [self.ids.index(int(i)) for i in response_ids]

    def forward(self, rollouts: Sequence[Rollout]) -> list[TokenStats]:
        with self.call("forward"):
            return self._forward(rollouts)

    def _forward(self, rollouts: Sequence[Rollout]) -> list[TokenStats]:
        self.seen.append(list(rollouts))
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
        with self.call("update"):
            return self._update(batch)

    def _update(self, batch: TrainBatch) -> UpdateResult:
        self.batches.append(batch)
        for minibatch in batch.minibatches:
            rows = Rows(minibatch, torch.device("cpu"))
            place = torch.arange(LENGTH).repeat(len(minibatch))
            names = ("advantages", "returns", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs", "weights")
            columns = {name: rows.column(name) for name in names}
            old = columns["old_logprobs"]
            weights = columns["weights"]
            written = np.concatenate([sample.response_ids for sample in minibatch])
            logprobs = self.logits.log_softmax(-1)[place, self._places(written)]
            correction = importance_weights(old, columns["rollout_logprobs"], rows.sequence_ids, weights, "token", 2.0)
            policy, _ = policy_loss(
                logprobs=logprobs,
                old_logprobs=old,
                importance_weights=correction,
                advantages=columns["advantages"],
                weights=weights,
                sequence_ids=rows.sequence_ids,
                clip_eps=0.2,
                clip_eps_high=0.2,
            )
            kl, _ = kl_loss(
                logprobs=logprobs,
                old_logprobs=old,
                ref_logprobs=columns["ref_logprobs"],
                importance_weights=correction,
                weights=weights,
            )
            critic, _ = value_loss(
                values=self.critic[place],
                old_values=columns["values"],
                returns=columns["returns"],
                weights=weights,
                value_clip=0.2,
            )
            loss = policy + batch.kl_coef * kl + critic
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.num_updates += 1
        return UpdateResult(policy_version=self.num_updates, metrics={"policy/loss": float(loss.detach())})

    def save(self, folder: Path) -> dict[str, Any]:
        with self.call("save"):
            state = {"table": [self.logits, self.critic], "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "num_updates": self.num_updates}, folder / "fake.pt")
            return {"fake.pt": describe_file(folder / "fake.pt")}

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "fake.pt", weights_only=True)
        with torch.no_grad():
            self.logits.copy_(state["table"][0])
            self.critic.copy_(state["table"][1])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]

    def export(self, folder: Path) -> None:
        with self.call("export"):
            folder.mkdir(exist_ok=True)
            (folder / "policy.json").write_text(json.dumps(self.logits.tolist()))


class FakeSync:
    def __init__(self, learner: FakeLearner, rollouts: FakeRollouts) -> None:
        self.learner = learner
        self.rollouts = rollouts

    async def push(self, policy_version: int) -> WeightSyncResult:
        with self.learner.call("push"):
            await asyncio.sleep(0)
        self.rollouts.logits = self.learner.logits.detach().clone()
        self.rollouts.version = policy_version
        return WeightSyncResult(policy_version=policy_version, seconds=0.0, bytes=48, probe_gap=0.0)


class LetterTask:
    """Scored by the share of `a`."""

    name = "letters"
    score_name = "share_a"
    step_pattern = "c"
    unit = 1.0

    def __init__(self) -> None:
        self.unmeasured: set[str] = set()  # prompts without a reference
        self.on_measure: Callable[[str], None] = lambda prompt_id: None
        self.sandboxes: list[SandboxConfig] = []  # that were asked for

    def faults(self, prompt: Prompt, response_text: str) -> list[tuple[str, int, int]]:
        return []

    def can_measure(self, prompt: Prompt) -> bool:
        return prompt.prompt_id not in self.unmeasured

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
