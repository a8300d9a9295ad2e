"""The learner group on real Ray and real ZeRO-3: what a rank computes does not depend on ranks and microbatches."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from models import random_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel

from actors.learner import LearnerGroup, LearnerSpec, load_models
from t2g.algo.critic import Critic
from t2g.algo.rows import Rows
from t2g.data.batching import make_train_batch, pack_tokens
from t2g.errors import RunStopped, UserError
from t2g.sections import LearnerConfig, ModelConfig, ObjectiveConfig, OptimConfig
from t2g.types import Rollout, TrainBatch, TrainSample

VOCABULARY = 300
TEMPERATURE = 0.7
MANY = 40  # token budget that cuts the rollouts into microbatches of one or two; the other groups take all in one
LEARNER = LearnerConfig(
    policy=OptimConfig(lr=1e-3, max_grad_norm=0.1, weight_decay=0.01),
    critic=OptimConfig(lr=2e-3),
    critic_warmup_steps=1,
    num_epochs=2,
    minibatches_per_epoch=2,
    tokens_per_microbatch=1000,
    cpus=0.25,
    memory_gib=0.5,
    sync_bucket_mib=0.1,
    step_timeout_s=90,
)


def spec(model: Path, learner: LearnerConfig = LEARNER) -> LearnerSpec:
    return LearnerSpec(
        model=ModelConfig(policy=str(model)), learner=learner, objective=ObjectiveConfig(), temperature=TEMPERATURE,
        num_updates=10, seed=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def groups(base: Path, cluster: None) -> Iterator[dict[str, LearnerGroup]]:
    """The same learner on one rank and on two, where a forward pass also takes many microbatches."""
    two = LEARNER.model_copy(update={"workers": 2, "tokens_per_microbatch": MANY})
    made = {
        "one": LearnerGroup(spec(base), placement_timeout_s=30),
        "ranks": LearnerGroup(spec(base, two), placement_timeout_s=30),
    }
    yield made
    for group in made.values():
        group.close()


@pytest.fixture(scope="module")
def start(groups: dict[str, LearnerGroup], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each group before its first update."""
    folders = {name: tmp_path_factory.mktemp(f"start-{name}") for name in groups}
    for name, group in groups.items():
        group.save(folders[name])
    return folders


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    rng = np.random.default_rng(0)
    return [
        Rollout(
            prompt_id=str(i), sample_index=0, response_text="", finish_reason="stop", policy_versions=((0, r, 0),),
            prompt_ids=rng.integers(0, VOCABULARY, p).astype(np.int32),
            response_ids=rng.integers(0, VOCABULARY, r).astype(np.int32),
            rollout_logprobs=rng.normal(-5, 1, r).astype(np.float32),
        )
        for i, (p, r) in enumerate([(4, 9), (11, 3), (1, 1), (30, 25), (5, 0), (7, 12), (3, 18)])
    ]  # fmt: skip


def train_batch(group: LearnerGroup, rollouts: list[Rollout], seed: int = 5, budget: int = 1000) -> TrainBatch:
    rng = np.random.default_rng(seed)
    stats = group.forward(rollouts)
    samples = [
        TrainSample(
            prompt_ids=r.prompt_ids,
            response_ids=r.response_ids,
            loss_mask=(rng.random(len(r.response_ids)) < 0.9).astype(np.float32),
            advantages=rng.normal(0, 1, len(r.response_ids)).astype(np.float32),
            returns=rng.normal(0, 1, len(r.response_ids)).astype(np.float32),
            values=s.values,
            old_logprobs=s.old_logprobs,
            rollout_logprobs=s.old_logprobs + rng.normal(0, 0.3, len(r.response_ids)).astype(np.float32),
            ref_logprobs=s.ref_logprobs,
        )
        for r, s in zip(rollouts, stats, strict=True)
    ]
    config = group.spec.learner
    return make_train_batch(samples, config.workers, budget, config.num_epochs, config.minibatches_per_epoch, seed)


def weights(group: LearnerGroup, dtype: str = "float32") -> dict[str, np.ndarray]:
    buckets = [ray.get(ref) for ref in group.stream_weights(dtype)]
    assert [b.index for b in buckets] == list(range(len(buckets)))
    return {name: t.copy() for b in buckets for name, t in zip(b.names, b.tensors, strict=True)}


def test_forward_equals_the_plain_model(groups: dict[str, LearnerGroup], rollouts: list[Rollout], base: Path) -> None:
    """Rows of a microbatch, any budget, any number of ranks = one sequence at a time in transformers."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    results = {name: group.forward(rollouts) for name, group in groups.items()}
    for i, rollout in enumerate(rollouts):
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])).long()
        with torch.no_grad():
            logprobs = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        before = slice(len(rollout.prompt_ids) - 1, len(ids) - 1)  # the positions that predict the response
        expected = logprobs[before].gather(-1, torch.from_numpy(rollout.response_ids).long()[:, None])[:, 0].numpy()
        entropy = -(logprobs.exp() * logprobs).sum(-1)[before].numpy()
        for stats in (results[name][i] for name in results):
            np.testing.assert_allclose(stats.old_logprobs, expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(stats.ref_logprobs, expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(stats.entropy, entropy, rtol=1e-4, atol=1e-5)
            assert stats.values.tolist() == [0] * len(rollout.response_ids)  # a fresh critic
    assert groups["one"].forward([]) == []


def test_values_are_of_the_state_before_the_token() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    critic = Critic(LlamaModel(config))
    torch.nn.init.normal_(critic.head.weight)
    sequences = [np.array([3, 7, 9, 2]), np.array([5, 1])]
    with torch.no_grad():
        values = Rows(pack_tokens(sequences), torch.device("cpu")).values(critic)
        prefixes = [torch.from_numpy(s[:t]) for s in sequences for t in range(len(s))]
        expected = [critic(p[None])[0, -1] if len(p) else torch.tensor(0.0) for p in prefixes]
    torch.testing.assert_close(values, torch.stack(expected))


def test_the_policy_rests_while_the_critic_warms_up(
    groups: dict[str, LearnerGroup], start: dict[str, Path], rollouts: list[Rollout]
) -> None:
    group = groups["one"]
    group.load(start["one"])
    before = weights(group)
    metrics = group.update(train_batch(group, rollouts)).metrics
    assert "policy/loss" not in metrics
    assert metrics["critic/grad_norm"] > 0
    assert all(np.array_equal(before[key], value) for key, value in weights(group).items())
    assert all(np.abs(s.values).max(initial=0) > 0 for s in group.forward(rollouts) if s.values.size)


def test_ranks_and_microbatches_do_not_change_an_update(
    groups: dict[str, LearnerGroup], start: dict[str, Path], rollouts: list[Rollout]
) -> None:
    """All of a minibatch at once, in many microbatches, and over two ranks of which some have nothing to do."""
    results, moved, values = {}, {}, {}
    before = weights(groups["one"])
    for case, name, budget in (("whole", "one", 1000), ("many", "one", MANY), ("ranks", "ranks", MANY)):
        group = groups[name]
        group.load(start[name])
        group.update(train_batch(group, rollouts, budget=budget))  # the critic's warm-up
        results[case] = group.update(train_batch(group, rollouts, budget=budget))
        moved[case], values[case] = weights(group), [s.values for s in group.forward(rollouts)]
        assert results[case].policy_version == 2
    whole = results["whole"].metrics
    assert whole["policy/grad_norm"] > 0.1  # so that clipping acts: an optimizer like Adam hides a gradient's scale
    assert whole["learner/optimizer_steps"] == 4
    assert whole["policy/lr"] == pytest.approx(1e-3 * np.mean([1, 35 / 36, 34 / 36, 33 / 36]))
    for case in ("many", "ranks"):
        for metric, value in whole.items():
            if metric != "learner/tokens_per_s":
                assert results[case].metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-7), (case, metric)
        for key, value in moved["whole"].items():
            assert np.abs(value - before[key]).max() > 1e-5, f"{key} did not learn"
            assert np.linalg.norm(moved[case][key] - value) < 1e-5 * np.linalg.norm(value), (case, key)
        for mine, value in zip(values[case], values["whole"], strict=True):
            np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["one", "ranks"])
def test_a_restored_group_makes_the_same_next_update(
    name: str, groups: dict[str, LearnerGroup], rollouts: list[Rollout], tmp_path: Path
) -> None:
    group = groups[name]
    group.update(train_batch(group, rollouts, seed=6))
    group.save(tmp_path)
    version, batch = group.policy_version, train_batch(group, rollouts, seed=7)
    first, after = group.update(batch), weights(group)
    group.update(batch)
    group.load(tmp_path)
    assert group.policy_version == version
    second = group.update(batch)
    again = weights(group)
    timing = {"learner/tokens_per_s": 0.0}
    assert second.metrics | timing == first.metrics | timing
    assert all(np.array_equal(after[key], again[key]) for key in after)


def test_stream_announcement_and_export_agree(
    groups: dict[str, LearnerGroup], rollouts: list[Rollout], tmp_path: Path
) -> None:
    group = groups["ranks"]
    sent = weights(group)
    assert [(m.name, m.shape) for m in group.announce()] == [(name, t.shape) for name, t in sent.items()]
    group.export(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", use_safetensors=True)
    loaded = dict(model.named_parameters())
    assert {name: tuple(p.shape) for name, p in loaded.items()} == {name: t.shape for name, t in sent.items()}
    for name, tensor in sent.items():
        np.testing.assert_array_equal(loaded[name].detach().numpy(), tensor, name)
    ids = np.arange(64)
    with torch.no_grad():
        logprobs = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.from_numpy(ids[1:, None]))[:, 0].numpy()
    np.testing.assert_allclose(group.probe_logprobs(ids), expected, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token_id is not None

    bits = weights(group, "bfloat16")
    for name, tensor in sent.items():
        rounded = torch.from_numpy(tensor).to(torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(bits[name], rounded, name)


@pytest.mark.parametrize("name", ["one", "ranks"])
def test_a_loss_that_is_not_finite_stops_before_it_is_applied(
    name: str, groups: dict[str, LearnerGroup], rollouts: list[Rollout]
) -> None:
    group = groups[name]
    group.update(train_batch(group, rollouts))  # past the critic's warm-up
    before, done = weights(group), group.policy_version
    batch = train_batch(group, rollouts)
    first, *rest = batch.minibatches
    poisoned = [list(micro) for micro in first.microbatches]
    poisoned[-1][0] = replace(poisoned[-1][0], advantages=np.full_like(poisoned[-1][0].advantages, np.nan))
    bad = TrainBatch(minibatches=(replace(first, microbatches=tuple(map(tuple, poisoned))), *rest))
    with pytest.raises(RunStopped, match=f"^policy, update {done + 1}, minibatch 1 of 4: the loss is not finite"):
        group.update(bad)
    after = weights(group)
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert group.policy_version == done


def test_other_ranks_checkpoint_is_refused(groups: dict[str, LearnerGroup], start: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"learner\.workers is 1, but .* was written by 2 ranks"):
        groups["one"].load(start["ranks"])


def test_a_dead_rank_is_named(groups: dict[str, LearnerGroup], rollouts: list[Rollout]) -> None:
    """Last of the tests with `groups`: it takes one away."""
    group = groups["ranks"]
    ray.kill(group.workers[1], no_restart=True)
    with pytest.raises(RunStopped, match=r"^learner rank 1 died during forward"):
        group.forward(rollouts)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.policy='.*nowhere' cannot be loaded"):
        load_models(spec(tmp_path / "nowhere"))


def test_pickled_weights_are_refused(base: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / name)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot be loaded: .*safetensors"):
        load_models(spec(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "gpus", "attention"), [("llama", 1, "sdpa"), ("gemma2", 1, "eager"), ("llama", 0, "eager")]
)
def test_attention_that_caps_its_logits_is_not_given_to_sdpa(
    architecture: str, gpus: int, attention: str, tmp_path: Path
) -> None:
    """transformers' sdpa drops Gemma 2's soft cap without a word; vLLM does not."""
    folder = random_model(tmp_path, architecture)
    policy, reference, critic, _ = load_models(spec(folder, LEARNER.model_copy(update={"gpus": gpus})))
    kinds = {model.config._attn_implementation for model in (policy, reference, critic.backbone)}
    assert kinds == {attention}
