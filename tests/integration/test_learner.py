"""The learner on real Ray and ZeRO-3: what it computes does not depend on ranks, microbatches and memory options."""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from heads import free_port
from learner_runs import (
    TEMPERATURE,
    SharedGroup,
    as_a_rank,
    learner_spec,
    saved_state,
    sent_weights,
    train_batch,
)
from models import random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.learner import zero3
from actors.learner.learner import LearnerGroup
from actors.learner.trainers import load_critic, load_policy
from t2g.config import OptimConfig, RoleConfig
from t2g.errors import LearnerLost, RunStopped, UserError
from t2g.types import Rollout

MANY = 40  # token budget that cuts the rollouts into microbatches of one or two; `one` takes all in one
VARIANTS = {
    "one": {},
    "ranks": {"workers": 2, "tokens_per_microbatch": MANY},
    "apart": {
        "tokens_per_microbatch": MANY,
        "critic_ranks": RoleConfig(cpus=0.25, memory_gib=0.25),
        "gradient_checkpointing": True,
        "offload": "cpu",
    },
}


@pytest.fixture(scope="module")
def groups(base: Path, hosts: list[Any]) -> Iterator[dict[str, LearnerGroup]]:
    """The same learner on one rank, on two, and on one each for policy and critic with less memory."""
    by_variant = {name: SharedGroup(learner_spec(base, **changes), hosts) for name, changes in VARIANTS.items()}
    yield by_variant
    for group in by_variant.values():
        group.close()


@pytest.fixture(scope="module")
def start(groups: dict[str, LearnerGroup], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each group before its first update."""
    folders = {name: tmp_path_factory.mktemp(f"start-{name}") for name in groups}
    for name, group in groups.items():
        group.save(folders[name])
    return folders


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


def test_the_policy_is_not_updated_while_the_critic_warms_up(
    groups: dict[str, LearnerGroup], start: dict[str, Path], rollouts: list[Rollout]
) -> None:
    group = groups["one"]
    group.load(start["one"])
    before = sent_weights(group)
    metrics = group.update(train_batch(group, rollouts)).metrics
    assert "policy/loss" not in metrics
    assert metrics["critic/grad_norm"] > 0
    assert all(np.array_equal(before[key], value) for key, value in sent_weights(group).items())
    assert all(np.abs(s.values).max(initial=0) > 0 for s in group.forward(rollouts) if s.values.size)


def test_ranks_microbatches_and_memory_do_not_change_an_update(
    groups: dict[str, LearnerGroup], start: dict[str, Path], rollouts: list[Rollout]
) -> None:
    """All of a minibatch at once; in many microbatches over two ranks of which some have nothing to do; and with the
    critic on a rank of its own, gradient checkpointing and all in host memory."""
    results = {}
    moved = {}
    values = {}
    before = sent_weights(groups["one"])
    for name, group in groups.items():
        group.load(start[name])
        group.update(train_batch(group, rollouts))  # the critic's warm-up
        results[name] = group.update(train_batch(group, rollouts))
        moved[name] = sent_weights(group)
        values[name] = [s.values for s in group.forward(rollouts)]
        assert results[name].policy_version == 2
    whole = results["one"].metrics
    assert whole["policy/grad_norm"] > 0.1  # so that clipping acts: an optimizer like Adam hides a gradient's scale
    assert whole["learner/optimizer_steps"] == 4
    assert whole["policy/lr"] == pytest.approx(1e-3 * np.mean([1, 35 / 36, 34 / 36, 33 / 36]))
    assert "policy/kl_loss" not in whole
    for name in ("ranks", "apart"):
        assert results[name].metrics.keys() == whole.keys()
        for metric, value in whole.items():
            if metric not in ("learner/tokens_per_s", "learner/peak_memory_gib"):
                assert results[name].metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-7), (name, metric)
        for key, value in moved["one"].items():
            assert np.abs(value - before[key]).max() > 1e-5, f"{key} did not learn"
            assert np.linalg.norm(moved[name][key] - value) < 1e-5 * np.linalg.norm(value), (name, key)
        for mine, value in zip(values[name], values["one"], strict=True):
            np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("start")  # saved before anything here is trained
@pytest.mark.parametrize("name", VARIANTS)
def test_a_restored_group_makes_the_same_next_update(
    name: str, groups: dict[str, LearnerGroup], rollouts: list[Rollout], tmp_path: Path
) -> None:
    group = groups[name]
    group.update(train_batch(group, rollouts, seed=6))
    group.save(tmp_path)
    version = group.policy_version
    batch = train_batch(group, rollouts, seed=7)
    first = group.update(batch)
    after = sent_weights(group)
    group.update(batch)
    group.load(tmp_path)
    assert group.policy_version == version
    if group.spec.learner.offload == "none":
        group.offload_states()  # as in a turn of the engines, in which weights are sent, scored and written
        assert np.isfinite(group.compute_probe_logprobs(np.arange(9, dtype=np.int32))).all()
        assert sent_weights(group)
        group.reload_states()
    second = group.update(batch)
    again = sent_weights(group)
    timing = {"learner/tokens_per_s": 0.0, "learner/peak_memory_gib": 0.0}
    assert second.metrics | timing == first.metrics | timing
    assert all(np.array_equal(after[key], again[key]) for key in after)


def test_stream_announcement_and_export_agree(
    groups: dict[str, LearnerGroup], rollouts: list[Rollout], tmp_path: Path
) -> None:
    group = groups["ranks"]
    sent = sent_weights(group)
    assert [*group.get_manifest().items()] == [(name, t.shape) for name, t in sent.items()]
    (tmp_path / "policy").mkdir(mode=0o750)
    group.export(tmp_path / "policy")
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "policy").iterdir()} == {0o640}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", use_safetensors=True)
    loaded = dict(model.named_parameters())
    assert {name: tuple(p.shape) for name, p in loaded.items()} == {name: t.shape for name, t in sent.items()}
    for name, tensor in sent.items():
        np.testing.assert_array_equal(loaded[name].detach().numpy(), tensor, name)
    ids = np.arange(64)
    with torch.no_grad():
        logprobs = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.from_numpy(ids[1:, None]))[:, 0].numpy()
    np.testing.assert_allclose(group.compute_probe_logprobs(ids), expected, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token_id is not None

    bits = sent_weights(group, "bfloat16")
    for name, tensor in sent.items():
        rounded = torch.from_numpy(tensor).to(torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(bits[name], rounded, name)


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("name", ["one", "ranks"])
def test_a_loss_that_is_not_finite_stops_before_it_is_applied(
    name: str, groups: dict[str, LearnerGroup], rollouts: list[Rollout]
) -> None:
    group = groups[name]
    group.update(train_batch(group, rollouts))  # past the critic's warm-up
    before = sent_weights(group)
    done = group.policy_version
    batch = train_batch(group, rollouts)
    first, *rest = batch.minibatches
    sample, *others = first
    poison = replace(sample, advantages=np.full_like(sample.advantages, np.nan))
    bad = replace(batch, minibatches=((poison, *others), *rest))
    with pytest.raises(RunStopped, match=f"^policy, update {done + 1}, minibatch 1 of 4: the loss is not finite"):
        group.update(bad)
    after = sent_weights(group)
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert group.policy_version == done


@pytest.mark.parametrize(
    ("wrote", "reads", "updates"), [("ranks", "one", 2), ("one", "ranks", 1), ("ranks", "apart", 2)]
)
def test_another_number_of_ranks_goes_on(
    wrote: str,
    reads: str,
    updates: int,
    groups: dict[str, LearnerGroup],
    start: dict[str, Path],
    rollouts: list[Rollout],
    tmp_path: Path,
) -> None:
    """Two ranks to one, one to two before the policy's first step, and to a critic on a rank of its own."""
    first = groups[wrote]
    second = groups[reads]
    first.load(start[wrote])
    for seed in range(updates):
        first.update(train_batch(first, rollouts, seed=seed))
    folder = tmp_path / "a + (b)"  # a path that is no pattern
    again = tmp_path / "again"
    folder.mkdir()
    again.mkdir()
    first.save(folder)
    second.load(folder)
    second.save(again)
    assert not list(folder.glob("*universal*"))
    for part, steps in (("policy", 4 * (updates - 1)), ("critic", 4 * updates)):
        (step, before) = saved_state(folder, part)
        (step_again, after) = saved_state(again, part)
        assert step == step_again == steps
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert any(value.any() for (_, kind), value in before.items() if kind == "exp_avg_sq") == (steps > 0)

    batch = train_batch(first, rollouts, seed=7)
    expected = first.update(batch)
    result = second.update(batch)
    assert result.policy_version == expected.policy_version == updates + 1
    for metric in expected.metrics.keys() - {"learner/tokens_per_s", "learner/peak_memory_gib"}:
        assert result.metrics[metric] == pytest.approx(expected.metrics[metric], rel=1e-5, abs=1e-7), metric
    moved = sent_weights(second)
    for key, value in sent_weights(first).items():
        assert np.linalg.norm(moved[key] - value) < 1e-5 * np.linalg.norm(value), key


def listening() -> set[Any]:
    return {connection for connection in psutil.Process().net_connections() if connection.status == psutil.CONN_LISTEN}


def test_microbatches_are_summed_in_float32() -> None:
    """Gradients 256 + 64 x 1, of each of four weights: in bfloat16 256 + 1 is 256."""
    with as_a_rank():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        before = listening()
        zero3.init_distributed(0, 1, "127.0.0.1", free_port(), "gloo", timeout_s=60)
        assert {connection.laddr.ip for connection in listening() - before} == {"127.0.0.1"}
        model = torch.nn.Linear(4, 1, bias=False).to(torch.bfloat16)
        engine = zero3.build_engine(model, OptimConfig(), dtype="bfloat16", world_size=1)

        def loss(model: Any, gradient: int) -> tuple[torch.Tensor, dict[str, float]]:
            return model(torch.full((1, 4), gradient, dtype=torch.bfloat16)).sum().float(), {}

        assert zero3.train_step(engine, [256] + 64 * [1], loss, label="sum").grad_norm == 2 * 320

        # A critic's backbone has the type of its files, its head torch's own.
        critic = torch.nn.Sequential(torch.nn.Linear(4, 4).to(torch.bfloat16), torch.nn.Linear(4, 1, bias=False))
        zero3.build_engine(critic, OptimConfig(), dtype="bfloat16", world_size=1)
        assert {weight.ds_tensor.dtype for weight in critic.parameters()} == {torch.bfloat16}


def make_engine(*, offload: bool) -> Any:
    """Return a ZeRO-3 engine of this process with three sub-groups (in real models of 10^9 weights each)."""
    import deepspeed

    zero3.init_distributed(0, 1, "127.0.0.1", free_port(), "gloo", timeout_s=60)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = zero3._config(model, "float32", 1, offload=offload)
    config["zero_optimization"]["sub_group_size"] = 64
    optimizer = zero3._adamw(model, OptimConfig(), offload=offload)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def make_step(engine: Any) -> None:
    zero3.train_step(engine, [torch.ones(1, 8)], lambda model, x: (model(x).sum(), {}), label="step")


def step_counts(folder: Path, *, offload: bool) -> list[float]:
    """Of Adam, by sub-group, after a step, a converted load and a step more."""
    engine = make_engine(offload=offload)
    make_step(engine)
    zero3.save_checkpoint(engine, folder, "part")
    zero3.convert_checkpoint(folder, "part")
    zero3.load_checkpoint(engine, folder, "part", universal=True)
    make_step(engine)
    return [float(state["step"]) for state in engine.optimizer.optimizer.state.values()]


def test_each_sub_group_counts_its_own_steps(tmp_path: Path) -> None:
    with as_a_rank():
        assert step_counts(tmp_path, offload=False) == [2.0, 2.0, 2.0]


def test_an_optimizer_whose_state_was_not_restored_is_refused(tmp_path: Path) -> None:
    """Its file is that of an earlier step: DeepSpeed loads both as if they belonged together."""
    with as_a_rank():
        engine = make_engine(offload=False)
        folders = [tmp_path / "first", tmp_path / "second"]
        for folder in folders:
            make_step(engine)
            zero3.save_checkpoint(engine, folder, "part")
        first, second = (next(folder.glob("part/*_optim_states.pt")) for folder in folders)
        zero3.load_checkpoint(engine, folders[1], "part")
        shutil.copy(first, second)
        with pytest.raises(ValueError, match=r"was not restored: Adam has made 1 steps, and the model 2$"):
            zero3.load_checkpoint(engine, folders[1], "part")


@pytest.mark.slow  # DeepSpeed compiles its AdamW for two minutes
def test_states_in_host_memory_as_on_a_rank_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero3, "_on_gpu", lambda: True)
    with as_a_rank():
        assert step_counts(tmp_path, offload=True) == [2.0, 2.0, 2.0]
        assert type(zero3._adamw(torch.nn.Linear(1, 1), OptimConfig(), offload=True)).__name__ == "DeepSpeedCPUAdam"


def test_a_critic_without_a_place_takes_the_policy_with_it(groups: dict[str, LearnerGroup], base: Path) -> None:
    free = ray.available_resources()["CPU"]
    spec = learner_spec(base, critic_ranks=RoleConfig(workers=2, cpus=round(0.7 * free, 2)))
    with pytest.raises(UserError, match=r"no place within 2 s for . of 2 learner\.critic_ranks workers"):
        LearnerGroup(spec, placement_timeout_s=2)
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) != free:
        assert time.monotonic() < deadline, "a place was not given back within 30 s"
        time.sleep(0.1)


def test_a_dead_critic_is_named(groups: dict[str, LearnerGroup], rollouts: list[Rollout]) -> None:
    """Last of the tests with `groups`: it takes one away. A rank of two dies in test_lost_rank."""
    ray.kill(groups["apart"].models["critic"].workers[0], no_restart=True)
    for _ in range(2):  # the first to hear of it speaks for all later ones
        with pytest.raises(LearnerLost, match=r"^critic rank 0 died during forward"):
            groups["apart"].forward(rollouts)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.policy='.*nowhere' cannot be loaded"):
        load_policy(learner_spec(tmp_path / "nowhere"), on_gpu=False)


def test_pickled_weights_are_refused(base: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / name)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot be loaded: .*safetensors"):
        load_critic(learner_spec(tmp_path), on_gpu=False)


@pytest.mark.parametrize(
    ("architecture", "on_gpu", "attention"),
    [("llama", True, "sdpa"), ("gemma2", True, "eager"), ("llama", False, "eager")],
)
def test_attention_that_caps_its_logits_is_not_given_to_sdpa(
    architecture: str, on_gpu: bool, attention: str, tmp_path: Path
) -> None:
    """transformers' sdpa drops Gemma 2's soft cap without a word; vLLM does not."""
    spec = learner_spec(random_model(tmp_path, architecture))
    policy, reference, _ = load_policy(spec, on_gpu=on_gpu)
    critic = load_critic(spec, on_gpu=on_gpu)
    assert {model.config._attn_implementation for model in (policy, reference, critic.backbone)} == {attention}
