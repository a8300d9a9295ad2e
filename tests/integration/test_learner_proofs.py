"""Proofs about the learner on real Ray, ZeRO-3 and vLLM: its gradients, and its gap to the engine.

The oracle is the slow, obvious loop: whole logits, one response and one token at a time, plain PyTorch.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_runs import (
    TEMPERATURE,
    VOCABULARY,
    SharedGroup,
    learner_spec,
    random_rollouts,
    sent_weights,
    train_batch,
)
from models import byte_llama
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from actors.learner.rank_batches import correction_metrics
from actors.learner.spec import NO_CRITIC
from actors.weights.sync import FleetWeightSync
from t2g.algo import head, shared_attention
from t2g.config import ObjectiveConfig, OptimConfig, RolloutConfig, with_overrides
from t2g.config.learning import TeacherConfig
from t2g.data.batching import normalize_weights
from t2g.errors import UserError
from t2g.feedback import token_offsets, token_rewards
from t2g.interfaces import Sampling
from t2g.loop.steps import make_train_samples
from t2g.types import (
    DistillationSample,
    Prompt,
    Rollout,
    ScoredRollout,
    Span,
    SpanFeedback,
    TeacherQuery,
    TrainBatch,
    TrainSample,
    TrainSequence,
)

# AdamW's first step is lr * g / (|g| + eps). Clipped this far below eps, g is left as it is: lr * g / eps. So the
# weights before and after tell the whole gradient, where an ordinary step would tell little more than its signs.
ADAM_EPS = 1e-8
TINY_NORM = 1e-14
LR = 1e8
READABLE = OptimConfig(lr=LR, max_grad_norm=TINY_NORM, schedule="constant")
NO_LR = OptimConfig(lr=1e-30)  # far below the last bit of any weight, float32 copies of bfloat16 ones included
OBJECTIVE = ObjectiveConfig(advantages="gae", kl_estimator="k3", entropy_coef=0.1, loss_aggregation="sequence")
KL_COEF = 0.3
ONE_STEP = {"policy": READABLE, "num_epochs": 1, "minibatches_per_epoch": 1, "critic_warmup_steps": 0}
VARIANTS = {
    "one": ONE_STEP,  # all in one microbatch
    "ranks": ONE_STEP | {"workers": 2, "tokens_per_microbatch": 40, "gradient_checkpointing": True},
    "shared": ONE_STEP | {"workers": 2, "tokens_per_microbatch": 40, "share_prompts": True},
}
ROLLOUT = RolloutConfig(cpus=0.5, max_model_len=128, max_new_tokens=32, kv_cache_gib=0.1)
ENGINE_TEMPERATURE = 0.6
# nats, over some 1,500 tokens; measured 2e-6 and .031 at most, 4e-7 and .007 in the mean
MAX_GAP = {"float32": 2e-5, "bfloat16": 0.1}
MEAN_GAP = {"float32": 2e-6, "bfloat16": 0.02}


@dataclass(frozen=True)
class Started:
    """A learner group and the checkpoint from which every test takes its one step."""

    group: LearnerGroup
    folder: Path

    def gradient(self, batch: TrainBatch) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Of the policy's loss with respect to each weight, and the update's metrics."""
        self.group.load(self.folder)
        before = sent_weights(self.group)
        metrics = self.group.update(batch).metrics
        scale = metrics["policy/grad_norm"] / TINY_NORM * ADAM_EPS / LR
        return {name: (before[name] - after) * scale for name, after in sent_weights(self.group).items()}, metrics


@pytest.fixture(scope="module")
def learners(base: Path, hosts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    started = {}
    for name, changes in VARIANTS.items():
        group = SharedGroup(learner_spec(base, OBJECTIVE, **changes), hosts)
        started[name] = Started(group, tmp_path_factory.mktemp(name))
        group.save(started[name].folder)
    yield started
    for learner in started.values():
        learner.group.close()


@pytest.fixture(scope="module")
def batch(learners: dict[str, Started]) -> TrainBatch:
    """One optimizer step in which every term of the loss acts: old and reference logprobs are not the policy's."""
    rng = np.random.default_rng(2)

    def noisy(sample: TrainSample) -> TrainSample:
        old, ref = (
            x + rng.normal(0, 0.3, len(x)).astype(np.float32) for x in (sample.old_logprobs, sample.ref_logprobs)
        )
        return replace(sample, old_logprobs=old, ref_logprobs=ref)

    rollouts = random_rollouts()
    for index in (2, 6):  # three responses to one prompt
        rollouts[index] = replace(rollouts[index], prompt_ids=rollouts[0].prompt_ids)
    plain = train_batch(learners["one"].group, rollouts, kl_coef=KL_COEF)
    (minibatch,) = plain.minibatches
    return replace(plain, minibatches=(tuple(map(noisy, minibatch)),))


def token_loss(sample: TrainSample, t: int, logprobs: torch.Tensor) -> torch.Tensor:
    """What one token adds before its share is taken. logprobs: [V], of the distribution it was drawn from."""
    logprob = logprobs[sample.response_ids[t]]
    advantage, old, ref = (float(x[t]) for x in (sample.advantages, sample.old_logprobs, sample.ref_logprobs))
    rho = (logprob - old).exp()
    clipped = rho.clamp(1 - OBJECTIVE.clip_eps, 1 + OBJECTIVE.clip_eps)
    correction = min(math.exp(old - float(sample.rollout_logprobs[t])), OBJECTIVE.rollout_correction_cap)
    k3 = (ref - logprob).exp() - 1 - (ref - logprob)
    kl = correction * rho.clamp(max=5) * k3
    entropy = -(logprobs.exp() * logprobs).sum()
    return -correction * torch.minimum(rho * advantage, clipped * advantage) + KL_COEF * kl - 0.1 * entropy


def plain_gradients(base: Path, samples: tuple[TrainSample, ...]) -> tuple[dict[str, np.ndarray], float]:
    """Of the policy, by name; and the norm of that of the critic's head, which alone has one while values are 0."""
    policy, backbone = (
        cls.from_pretrained(base, attn_implementation="eager") for cls in (AutoModelForCausalLM, AutoModel)
    )
    counting = [s for s in samples if s.weights.any()]
    loss = torch.tensor(0.0)
    head_gradient = torch.zeros(backbone.config.hidden_size)
    for sample in counting:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()[None]
        logprobs = (policy(ids).logits[0] / TEMPERATURE).log_softmax(-1)
        hidden = backbone(ids).last_hidden_state[0].detach()
        for t in np.flatnonzero(sample.weights):
            share = 1 / len(counting) / np.count_nonzero(sample.weights)
            before = len(sample.prompt_ids) + t - 1
            loss = loss + share * token_loss(sample, t, logprobs[before])
            head_gradient -= share * OBJECTIVE.vf_coef * sample.returns[t] * hidden[before]
    loss.backward()
    return {name: p.grad.numpy() for name, p in policy.named_parameters()}, head_gradient.norm().item()


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_the_plain_loop(
    name: str, learners: dict[str, Started], batch: TrainBatch, base: Path
) -> None:
    """In one microbatch, in many over two ranks with layers computed again, and with one copy of each prompt."""
    expected, critic_norm = plain_gradients(base, batch.minibatches[0])
    gradient, metrics = learners[name].gradient(batch)
    assert gradient.keys() == expected.keys()
    for key, expected_grad in expected.items():
        assert np.linalg.norm(gradient[key] - expected_grad) < 1e-4 * np.linalg.norm(expected_grad), key
    norm = np.sqrt(sum(np.square(expected_grad, dtype=np.float64).sum() for expected_grad in expected.values()))
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(critic_norm, rel=1e-5)
    assert metrics["policy/clip_share"] > 0.1


@pytest.mark.usefixtures("cluster")
def test_a_model_whose_attention_mixes_responses_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model does not pass the groups of a row to its attention. A run's tolerance for the probe changes nothing."""
    attend = shared_attention.attend

    def attend_to_all(*args: Any, prompt_groups: object = None, **options: Any) -> Any:
        return attend(*args, **options)

    monkeypatch.setattr(shared_attention, "attend", attend_to_all)
    try:
        with pytest.raises(UserError, match=r"^learner\.share_prompts is true.*\(llama\).*rounding explains 0\.001"):
            SharedGroup(learner_spec(base, NO_CRITIC, share_prompts=True, probe_tolerance=3))
    finally:
        monkeypatch.undo()
        shared_attention.register()  # transformers keeps the attention for all models of this process


@pytest.mark.usefixtures("cluster")
def test_supervised_gradients_are_those_of_plain_cross_entropy(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 8 tokens of a head that is tied to the embeddings, in microbatches of 40 tokens."""
    monkeypatch.setattr(head, "CHUNK_TOKENS", 8)
    rng = np.random.default_rng(4)
    policy = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    minibatch = normalize_weights(
        [
            TrainSequence(prompt_ids=r.prompt_ids, response_ids=r.response_ids, weights=rng.random(len(r.response_ids)))
            for r in random_rollouts()
        ]
    )
    loss = torch.tensor(0.0)
    for sequence in minibatch:
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids])).long()
        logits = policy(ids[None]).logits[0, len(sequence.prompt_ids) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits, ids[len(sequence.prompt_ids) :], reduction="none")
        loss = loss + (losses * torch.from_numpy(sequence.weights)).sum()
    loss.backward()

    spec = learner_spec(base, NO_CRITIC, **ONE_STEP | {"tokens_per_microbatch": 40})
    with closing(SharedGroup(replace(spec, loss="supervised", temperature=1.0))) as group:
        group.save(tmp_path)
        gradient, metrics = Started(group, tmp_path).gradient(TrainBatch(minibatches=(minibatch,)))
        module = group.models["policy"].workers[0].worker.models["policy"].engine.module
        assert isinstance(module.get_output_embeddings(), head.ChunkedHead)
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in policy.named_parameters():
        expected_grad = weight.grad.numpy()
        assert np.linalg.norm(gradient[name] - expected_grad) < 1e-4 * np.linalg.norm(expected_grad), name


def test_the_only_pass_of_an_update_says_the_old_logprobs(
    learners: dict[str, Started], base: Path, tmp_path: Path
) -> None:
    """Without a critic, with the KL in the loss: as with a pass before the update, which is spared."""
    rollouts = random_rollouts()
    learner = learners["one"]
    learner.group.load(learner.folder)
    reports = learner.group.forward(rollouts)
    batch = train_batch(learner.group, rollouts, kl_coef=KL_COEF)
    expected, _ = plain_gradients(base, batch.minibatches[0])

    objective = OBJECTIVE.model_copy(update={"advantages": "group", "whiten": "none"})
    changes = ONE_STEP | {"tokens_per_microbatch": 40}
    with closing(SharedGroup(learner_spec(base, objective, **changes))) as group:
        requests = group.forward(rollouts)
        assert not any(t.old_logprobs.any() or t.entropy.any() for t in requests)
        for now, before in zip(group.forward(rollouts, ["old_logprobs"]), reports, strict=True):  # as jobs.compare asks
            np.testing.assert_allclose(now.old_logprobs, before.old_logprobs, rtol=1e-4, atol=1e-5)
            assert not now.ref_logprobs.any()
        unseen = tuple(replace(s, old_logprobs=np.full_like(s.old_logprobs, np.nan)) for s in batch.minibatches[0])
        started = Started(group, tmp_path)
        group.save(tmp_path)
        gradient, metrics = started.gradient(replace(batch, minibatches=(unseen,)))
        group.load(tmp_path)
        seen = group.update(replace(batch, minibatches=(unseen,))).stats
    for key, expected_grad in expected.items():
        assert np.linalg.norm(gradient[key] - expected_grad) < 1e-4 * np.linalg.norm(expected_grad), key
    for name in ("old_logprobs", "ref_logprobs", "entropy"):
        for now, before in zip(seen, reports, strict=True):
            np.testing.assert_allclose(getattr(now, name), getattr(before, name), rtol=1e-4, atol=1e-5)
    for name, value in correction_metrics(batch, objective).items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("top_k", [3, 10_000])
@pytest.mark.usefixtures("cluster")
def test_the_gradient_with_a_teacher_is_that_of_the_plain_loop(top_k: int, base: Path, tmp_path: Path) -> None:
    """(1 - w) L_policy + w KL(policy || teacher) over the likeliest tokens and the rest, or the whole vocabulary."""
    weight = 0.7
    rng = np.random.default_rng(3)
    objective = ObjectiveConfig(
        advantages="group", whiten="none", kl_estimator="k3", teacher=TeacherConfig(weight=weight, top_k=top_k)
    )
    rollouts = [r for r in random_rollouts() if len(r.response_ids)]
    policy = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")

    def logprobs(prompt_ids: np.ndarray, response_ids: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([prompt_ids, response_ids])).long()
        return (policy(ids[None]).logits[0, len(prompt_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1)

    with closing(SharedGroup(learner_spec(base, objective, **ONE_STEP | {"tokens_per_microbatch": 40}))) as group:
        group.save(tmp_path)
        stats = group.forward(rollouts)
        prompts = [np.append(rng.integers(0, VOCABULARY, 5), r.prompt_ids).astype(np.int32) for r in rollouts]
        teacher = group.score_teacher(
            [
                TeacherQuery(prompt_ids=ids, response_ids=r.response_ids, top_ids=s.top_ids)
                for ids, r, s in zip(prompts, rollouts, stats, strict=True)
            ]
        )
        plain = train_batch(group, rollouts, kl_coef=KL_COEF)
        mask = np.ones(len(rollouts))
        mask[1] = 0.0  # the teacher has not read this critique
        samples = []
        for sample, s, t, has_teacher in zip(plain.minibatches[0], stats, teacher, mask, strict=True):
            teacher_mask = np.full(len(sample.response_ids), has_teacher, np.float32)
            distilled = DistillationSample(
                **vars(sample), top_ids=s.top_ids, teacher_logprobs=t.top_logprobs, teacher_mask=teacher_mask
            )
            samples.append(distilled)
        batch = replace(plain, minibatches=(tuple(samples),))
        gradient, metrics = Started(group, tmp_path).gradient(batch)

    loss = torch.tensor(0.0)
    for sample, ids, t, has_teacher in zip(samples, prompts, teacher, mask, strict=True):
        now = logprobs(sample.prompt_ids, sample.response_ids)
        taught = logprobs(ids, sample.response_ids).detach()
        sampled = torch.from_numpy(sample.response_ids).long()
        np.testing.assert_allclose(t.logprobs, taught[range(len(sampled)), sampled], rtol=1e-4)
        for i in np.flatnonzero(sample.weights):
            ppo = token_loss(sample, i, now[i]) + 0.1 * -(now[i].exp() * now[i]).sum()  # without the entropy bonus
            k3 = KL_COEF * ((d := float(sample.ref_logprobs[i]) - now[i][sampled[i]]).exp() - 1 - d)
            top = now[i].detach().topk(min(top_k, now.shape[1])).indices
            p, q = ([*dist[i][top].exp()] for dist in (now, taught))
            if len(top) < now.shape[1]:
                p, q = ([*part, 1 - sum(part)] for part in (p, q))
            divergence = sum(a * (a / b).log() for a, b in zip(p, q, strict=True))
            loss = loss + float(sample.weights[i]) * (
                (1 - weight) * (ppo - k3) + weight * float(has_teacher) * divergence + k3
            )
    loss.backward()
    for name, parameter in policy.named_parameters():
        expected_grad = parameter.grad.numpy()
        assert np.linalg.norm(gradient[name] - expected_grad) < 1e-3 * np.linalg.norm(expected_grad), name
    assert metrics["teacher/kl"] > 0.01


@pytest.mark.usefixtures("cluster")
def test_a_teacher_that_scales_scores_the_sampled_tokens_alone(base: Path) -> None:
    """As the plain loop does, after other prompts; the update has no KL to them."""
    objective = ObjectiveConfig(advantages="group", whiten="none", teacher=TeacherConfig(use="scale"))
    rollouts = [rollout for rollout in random_rollouts() if len(rollout.response_ids)]
    queries = []
    for rollout in rollouts:
        prompt_ids = np.append(np.int32(7), rollout.prompt_ids)
        queries.append(TeacherQuery(prompt_ids=prompt_ids, response_ids=rollout.response_ids))

    with closing(SharedGroup(learner_spec(base, objective, **ONE_STEP | {"tokens_per_microbatch": 40}))) as group:
        stats = group.forward(rollouts)
        teacher = group.score_teacher(queries)
        metrics = group.update(train_batch(group, rollouts, kl_coef=KL_COEF)).metrics

    policy = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    for query, teacher_stats, token_stats in zip(queries, teacher, stats, strict=True):
        ids = torch.from_numpy(np.concatenate([query.prompt_ids, query.response_ids])).long()
        start = len(query.prompt_ids)
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, start - 1 : -1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(-1, ids[start:, None]).squeeze(-1)
        np.testing.assert_allclose(teacher_stats.logprobs, expected, rtol=1e-4)
        assert teacher_stats.top_logprobs.size == token_stats.top_ids.size == 0
        assert token_stats.old_logprobs.all(), "the weights need them before the update"
    assert "teacher/kl" not in metrics


@pytest.mark.parametrize("name", VARIANTS)
def test_a_masked_token_has_exactly_no_gradient(name: str, learners: dict[str, Started], batch: TrainBatch) -> None:
    """Whatever its numbers are, to the last bit of every weight: of policy, and of critic by the norm."""

    def poisoned(sample: TrainSample) -> TrainSample:
        fields = ("advantages", "returns", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs")
        masked = sample.weights == 0
        return replace(sample, **{f: np.where(masked, np.float32(np.nan), getattr(sample, f)) for f in fields})

    (minibatch,) = batch.minibatches
    poison = tuple(map(poisoned, minibatch))
    assert sum(np.isnan(s.advantages).sum() for s in poison) > 3
    clean, clean_metrics = learners[name].gradient(batch)
    gradient, metrics = learners[name].gradient(replace(batch, minibatches=(poison,)))
    assert all(np.array_equal(gradient[key], clean[key]) for key in clean)
    for metric in ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm"):
        assert metrics[metric] == clean_metrics[metric]


def test_one_span_moves_what_came_before_it(learners: dict[str, Started], base: Path) -> None:
    """V = 0, beta = 0, unwhitened, one labelled token at s: A_t = delta (gamma lambda)^(s - t), 0 after."""
    gamma = 0.9
    lam = 0.8
    objective = ObjectiveConfig(advantages="gae", gamma=gamma, lam=lam, whiten="none", kl_coef=0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    text = "Nobody saw it."
    prompt_ids, response_ids = (np.array(tokenizer.encode(t), np.int32) for t in ("Say what is wrong.", text))
    offsets = token_offsets(tokenizer, response_ids)
    labelled = len(response_ids) // 2
    start, end = (int(x) for x in offsets[labelled])
    span = Span(start=start, end=end, label=-1)
    rollout = Rollout(
        prompt_id="a", sample_index=0, prompt_ids=prompt_ids, response_ids=response_ids, response_text=text,
        rollout_logprobs=np.full(len(response_ids), -1, np.float32), finish_reason="stop",
        policy_versions=((0, len(response_ids), 0),),
    )  # fmt: skip
    rewards = token_rewards(offsets, [span], text=text)
    scored = ScoredRollout(
        rollout=rollout,
        feedback=SpanFeedback(critique="", spans=(span,), status="ok", source="test", version="1"),
        token_rewards=rewards,
        span_values=rewards,
        sentence_ids=np.zeros(len(response_ids), np.int32),
        answer_mask=np.ones(len(response_ids), bool),
    )
    learner = learners["ranks"]
    learner.group.load(learner.folder)  # whose critic says 0
    (sample,) = make_train_samples([scored], learner.group.forward([rollout]), objective, kl_coef=0.0, seed=1)
    expected = [-((gamma * lam) ** (labelled - t)) if t <= labelled else 0.0 for t in range(len(response_ids))]
    assert 2 < labelled < len(response_ids) - 2
    np.testing.assert_allclose(sample.advantages, expected, rtol=1e-5, atol=0)


@dataclass(frozen=True)
class Pair:
    """An engine and a learner whose learning rate is as good as 0, both of one type."""

    dtype: str
    fleet: RolloutFleet
    group: LearnerGroup

    def sample(self, temperature: float) -> list[Rollout]:
        """48 responses of up to 32 tokens; the same for the same weights."""
        sampling = Sampling(num_samples=4, temperature=temperature, max_new_tokens=ROLLOUT.max_new_tokens, seed=1)

        async def run() -> list[list[Rollout]]:
            return await asyncio.gather(*(self.fleet.sample(prompt, sampling) for prompt in prompts()))

        return [rollout for rollouts in asyncio.run(run()) for rollout in rollouts]

    def gaps(self, rollouts: list[Rollout]) -> np.ndarray:
        """Learner less engine, all tokens of all responses, at the learner's temperature."""
        stats = self.group.forward(rollouts)
        return np.concatenate([s.old_logprobs - r.rollout_logprobs for s, r in zip(stats, rollouts, strict=True)])


def prompts() -> list[Prompt]:
    rng = np.random.default_rng(3)
    return [
        Prompt(prompt_id=str(i), prompt_ids=rng.integers(5, VOCABULARY, 8 + i, dtype=np.int32), prompt_text="", task="")
        for i in range(12)
    ]


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def pair(
    request: pytest.FixtureRequest, rollout_fleet: RolloutFleet, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """In float32 with the engine of all, which is sent the learner's weights; one of bfloat16 is its own."""
    dtype = request.param
    probe_tolerance = {"float32": 1e-3, "bfloat16": 0.25}[dtype]
    changes = ONE_STEP | {"policy": NO_LR, "critic": NO_LR, "dtype": dtype, "probe_tolerance": probe_tolerance}
    with ExitStack() as stack:
        fleet = rollout_fleet
        model = tmp_path_factory.mktemp("sent")
        byte_llama(model, seed=3, spread=0.08)
        if dtype != "float32":
            model = base
            fleet = RolloutFleet(str(base), ROLLOUT.model_copy(update={"dtype": dtype}), seed=1, placement_timeout_s=30)
            stack.callback(fleet.close)
            fleet.wait_ready()
        spec = replace(learner_spec(model, OBJECTIVE, **changes), temperature=ENGINE_TEMPERATURE)
        group = SharedGroup(spec)
        stack.callback(group.close)
        asyncio.run(
            FleetWeightSync(group, fleet, group.spec.learner).push(1)
        )  # 0 is the checkpoint, which both would have
        yield Pair(dtype, fleet, group)


def test_engine_and_learner_agree_at_any_temperature(pair: Pair) -> None:
    """The learner takes the very tokens that the engine drew: nothing is left of the gap but rounding."""
    cold = pair.sample(ENGINE_TEMPERATURE)
    warm = pair.sample(1.0)
    scores = [pair.group.compute_probe_logprobs(np.concatenate([r.prompt_ids, r.response_ids])) for r in warm[:12]]
    at_one = [s[-len(r.response_ids) :] - r.rollout_logprobs for s, r in zip(scores, warm[:12], strict=True)]
    for gaps in (np.abs(pair.gaps(cold)), np.abs(np.concatenate(at_one))):
        assert gaps.size > 100
        assert gaps.max() < MAX_GAP[pair.dtype]
        assert gaps.mean() < MEAN_GAP[pair.dtype]
    assert np.abs(pair.gaps(warm)).mean() > 0.1  # what one temperature for both would hide


def test_without_a_learning_rate_the_gap_stays(pair: Pair) -> None:
    """Rounds of sampling, update and sync: what changes the gap where no weight moves is a bug."""
    sync = FleetWeightSync(pair.group, pair.fleet, pair.group.spec.learner)
    before = sent_weights(pair.group)
    means = []
    for step in (1, 2, 3):
        rollouts = pair.sample(ENGINE_TEMPERATURE)
        means.append(np.abs(pair.gaps(rollouts)).mean())
        metrics = pair.group.update(train_batch(pair.group, rollouts, seed=step)).metrics
        assert metrics["policy/grad_norm"] > 0.1 and metrics["critic/grad_norm"] > 0
        assert asyncio.run(sync.push(step)).policy_version == step
    assert means == pytest.approx([means[0]] * 3, rel=0.1)
    assert all(np.array_equal(before[key], value) for key, value in sent_weights(pair.group).items())


def test_the_surrogate_and_its_clip_reach_the_learner(
    base: Path, hosts: list[Any], learners: dict[str, Started], batch: TrainBatch
) -> None:
    """GSPO and an upper clip give other gradients of the same batch."""
    _, plain = learners["one"].gradient(batch)
    norms = {}
    for name, changes in {"gspo": {"surrogate": "gspo"}, "higher": {"clip_eps_high": 5.0}}.items():
        objective = with_overrides(OBJECTIVE, changes)
        group = SharedGroup(learner_spec(base, objective, **ONE_STEP), hosts)
        norms[name] = group.update(batch).metrics["policy/grad_norm"]
        group.close()
    assert norms["gspo"] != pytest.approx(plain["policy/grad_norm"], rel=1e-3)
    assert norms["higher"] > plain["policy/grad_norm"]
