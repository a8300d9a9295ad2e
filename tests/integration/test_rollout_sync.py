"""A real rollout fleet and a real weight sync: Ray, vLLM, our store transfer. The learner is a torch model here."""

import asyncio
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from gloo_group import GlooWorker, cpu_streams
from heads import free_port
from models import BYTE_EOS, BYTE_VOCABULARY, byte_llama
from processes import title
from transformers import LlamaForCausalLM

from actors.engines.engine import engine_environment
from actors.engines.multi_turn import Conversations
from actors.engines.rollout import RolloutFleet
from actors.learner import lora
from actors.vllm_compat.transports import NcclSender
from actors.weights.buckets import Bucket, Rendezvous, Shapes, make_bucket, plan_buckets
from actors.weights.sync import FleetWeightSync
from t2g.config import LearnerConfig, LoRAConfig, ModelConfig, PolicyJob, RolloutConfig
from t2g.environments.environment import Environment
from t2g.errors import LearnerLost, RunStopped, UserError
from t2g.interfaces import Sampling
from t2g.tasks.prompts_only import PromptsTask
from t2g.text.tokenizer import load_tokenizer
from t2g.types import Prompt, Rollout, WeightSyncResult

TEMPERATURE = 0.7


class TorchLearner:
    """A `WeightOwner` around a torch model. `withheld` is only in the manifest; `stale` is sent as `before` has it;
    its ranks die before bucket `lost_at`."""

    policy_version = 0

    def __init__(
        self,
        model: LlamaForCausalLM,
        *,
        withheld: str = "",
        stale: str = "",
        before: LlamaForCausalLM | None = None,
        lost_at: int | None = None,
    ) -> None:
        self.lost_at = lost_at
        self.weights = {name: p.detach() for name, p in model.named_parameters()}
        self.model = model
        self.withheld = withheld
        self.sent = dict(self.weights)
        if before is not None:
            self.sent[stale] = before.get_parameter(stale).detach()

    def get_manifest(self) -> Shapes:
        return {name: tuple(p.shape) for name, p in self.weights.items()}

    def stream_weights(
        self, dtype: str, *, full: bool, rendezvous: Rendezvous | None
    ) -> Iterator["ray.ObjectRef[Bucket]"]:
        for index, planned in enumerate(plan_buckets(self.get_manifest(), dtype=dtype, bucket_bytes=2**17)):
            if index == self.lost_at:
                raise LearnerLost("learner rank 0 died during stream_weights")
            names = tuple(n for n in planned if n != self.withheld)
            tensors = [self.sent[n].numpy() for n in names]
            yield ray.put(make_bucket(index, names, tensors, full=full, started=time.monotonic()))

    def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        return logprobs_of(self.model, ids, temperature=1.0)


@torch.no_grad()
def logprobs_of(model: LlamaForCausalLM, ids: np.ndarray, *, temperature: float) -> np.ndarray:
    """[N - 1]: transformers' own forward of one unbatched sequence."""
    logits = model(torch.tensor(ids, dtype=torch.long)[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.long)].numpy()


def largest_gap(model: LlamaForCausalLM, rollouts: Sequence[Rollout]) -> float:
    gaps = []
    for r in rollouts:
        expected = logprobs_of(model, np.concatenate([r.prompt_ids, r.response_ids]), temperature=TEMPERATURE)
        gaps.append(np.abs(expected[len(r.prompt_ids) - 1 :] - r.rollout_logprobs).max())
    return float(max(gaps))


def prompt(number: int, length: int = 12) -> Prompt:
    ids = np.random.default_rng(number).integers(0, 200, length, dtype=np.int32)
    return Prompt(prompt_id=f"p{number}", prompt_ids=ids, prompt_text="", task="prompts")


def push(learner: TorchLearner, fleet: RolloutFleet, version: int) -> WeightSyncResult:
    return asyncio.run(FleetWeightSync(learner, fleet, LearnerConfig()).push(version))


def sample(fleet: RolloutFleet, prompts: Sequence[Prompt], seed: int = 1, max_new: int = 32) -> list[list[Rollout]]:
    sampling = Sampling(num_samples=4, temperature=TEMPERATURE, max_new_tokens=max_new, seed=seed)

    async def run() -> list[list[Rollout]]:
        return await asyncio.gather(*(fleet.sample(p, sampling) for p in prompts))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def policies(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """What the engine loads, and another one."""
    old = LlamaForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    return old, byte_llama(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module")
def fleet(rollout_fleet: RolloutFleet, policies: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> RolloutFleet:
    push(TorchLearner(policies[0]), rollout_fleet, 0)
    return rollout_fleet


def test_turns_of_a_conversation_are_sampled_after_all_that_came_before(
    fleet: RolloutFleet, policies: tuple[LlamaForCausalLM, LlamaForCausalLM], policy: Path
) -> None:
    job = PolicyJob.model_validate(
        {
            "model": {"policy": str(policy)},
            "data": {"path": "unused"},
            "environment": "stub_engines:Again",
            "feedback": {"source": "pkg:judge"},
            "rollout": {"max_turns": 3, "max_new_tokens": 32, "max_model_len": 100},
        }
    )
    tokenizer = load_tokenizer(str(policy))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
    source = Conversations(fleet, job.rollout, Environment(job, PromptsTask()), tokenizer)
    sampling = Sampling(num_samples=4, temperature=TEMPERATURE, max_new_tokens=32, seed=3)

    async def run() -> list[list[Rollout]]:
        return await asyncio.gather(*(source.sample(prompt(i), sampling) for i in range(12)))

    rollouts = [rollout for group in asyncio.run(run()) for rollout in group]
    longer = [rollout for rollout in rollouts if len(rollout.environment_turns) > 1]
    assert len(rollouts) == 48 and longer
    assert all(len(r.prompt_ids) + len(r.response_ids) <= 100 for r in rollouts)
    for rollout in longer:
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        expected = logprobs_of(policies[0], ids, temperature=TEMPERATURE)[len(rollout.prompt_ids) - 1 :]
        mask = rollout.policy_mask
        np.testing.assert_allclose(rollout.rollout_logprobs[mask], expected[mask], atol=1e-4)
        assert not mask.all()
        assert not rollout.rollout_logprobs[~mask].any()
        first, second, *_ = (rollout.rollout_logprobs[slice(*turn.tokens)] for turn in rollout.environment_turns)
        assert first[0] != second[0], "another seed"


def test_samples_depend_on_the_seed_alone_and_logprobs_are_those_of_transformers(
    fleet: RolloutFleet, policies: tuple[LlamaForCausalLM, LlamaForCausalLM]
) -> None:
    alone = sample(fleet, [prompt(0)])[0]
    (engine,) = fleet.serving()
    ray.get(engine.handle.measure.remote())
    batch = sample(fleet, [prompt(i) for i in range(16)])
    measured = ray.get(engine.handle.measure.remote())
    assert measured.num_generated == sum(len(r.response_ids) for group in batch for r in group)
    assert measured.busy_s > 0
    assert measured.num_steps >= 32
    assert measured.num_preempted == 0
    assert 0 < measured.cache_use <= 1 and measured.cache_tokens > 64 * 44
    other = sample(fleet, [prompt(0)], seed=2)[0]
    assert [r.sample_index for r in alone] == [0, 1, 2, 3]
    assert len({r.response_ids.tobytes() for r in alone}) == 4
    for a, b, c in zip(alone, batch[0], other, strict=True):
        np.testing.assert_array_equal(a.response_ids, b.response_ids)
        assert a.response_ids.tobytes() != c.response_ids.tobytes()
    rollouts = [r for group in batch for r in group]
    assert largest_gap(policies[0], rollouts) < 1e-4
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    assert ended
    assert all(r.response_ids[-1] == BYTE_EOS for r in ended)
    assert all(len(r.response_ids) == 32 for r in rollouts if r.finish_reason == "length")
    assert all(r.policy_versions == ((0, len(r.response_ids), 0),) for r in rollouts)
    first = alone[0]
    assert first.response_text == bytes(b for i in first.response_ids if i < 256 for b in _byte_of(int(i))).decode(
        errors="replace"
    )


def test_scores_are_those_of_transformers_also_in_a_full_window(
    fleet: RolloutFleet, policies: tuple[LlamaForCausalLM, LlamaForCausalLM]
) -> None:
    for requests, length in ((prompt(0), 5), (prompt(1, length=608), 32), (prompt(2), 1)):
        response_ids = prompt(3, length=length).prompt_ids
        expected = logprobs_of(policies[0], np.concatenate([requests.prompt_ids, response_ids]), temperature=1.0)
        scores = asyncio.run(fleet.compute_logprobs(requests, response_ids))
        np.testing.assert_allclose(scores, expected[len(requests.prompt_ids) - 1 : -1], atol=1e-4)


def _byte_of(token: int) -> bytes:
    """GPT-2's table the slow way: token i of the test's vocabulary is character i of the sorted byte alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    char = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    character = sorted(char.values())[token]
    return bytes([next(b for b, c in char.items() if c == character)])


def test_a_sync_brings_the_new_weights_and_the_probe_agrees(
    fleet: RolloutFleet, policies: tuple[LlamaForCausalLM, LlamaForCausalLM]
) -> None:
    _, new = policies
    learner = TorchLearner(new)
    before = sample(fleet, [prompt(0)])[0]
    result = push(learner, fleet, 7)
    print(f"sync {result.seconds * 1000:.0f} ms, {result.bytes} bytes, probe gap {result.probe_gap:.1e}")
    assert result.policy_version == 7 and result.probe_gap < 1e-4
    assert result.bytes >= 4 * sum(p.numel() for p in learner.weights.values())
    after = sample(fleet, [prompt(0)])[0]
    assert largest_gap(new, after) < 1e-4
    assert before[0].response_ids.tobytes() != after[0].response_ids.tobytes()
    assert after[0].policy_versions == ((0, len(after[0].response_ids), 7),)


def wait_for_tokens(fleet: RolloutFleet) -> None:
    """Wait until an engine has generated tokens of the requests under way."""
    deadline = time.monotonic() + 60
    while asyncio.run(fleet.engine_metrics())["tokens_per_s"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_responses_under_way_go_on_with_the_new_weights_and_say_which_tokens_are_whose(
    fleet: RolloutFleet, policies: tuple[LlamaForCausalLM, LlamaForCausalLM]
) -> None:
    old, new = policies
    with ThreadPoolExecutor() as pool:
        under_way = pool.submit(sample, fleet, [prompt(i) for i in range(8)], 3, 600)
        wait_for_tokens(fleet)
        push(TorchLearner(old), fleet, 8)
        rollouts = [r for group in under_way.result() for r in group]
    crossed = [r for r in rollouts if len(r.policy_versions) == 2]
    assert crossed
    for r in crossed:
        (start, switch, first), (same, end, second) = r.policy_versions
        assert (start, first, same, end, second) == (0, 7, switch, len(r.response_ids), 8)
        ids = np.concatenate([r.prompt_ids, r.response_ids])
        prefix = len(r.prompt_ids) - 1
        for model, part in ((new, slice(0, switch)), (old, slice(switch, end))):
            expected = logprobs_of(model, ids, temperature=TEMPERATURE)[prefix:]
            np.testing.assert_allclose(r.rollout_logprobs[part], expected[part], atol=1e-3)  # 600 tokens of float32


class AdapterLearner(TorchLearner):
    """Sends adapters alone, and computes with them, unmerged."""

    def __init__(self, folder: Path, config: LoRAConfig) -> None:
        super().__init__(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
        lora.add_adapters(self.model, config, ModelConfig(policy=str(folder)), dropout=0.0)
        named = ((lora.adapter_name(name), p.detach()) for name, p in self.model.named_parameters())
        self.weights = self.sent = {name: p for name, p in named if name is not None}

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, factor in self.weights.items():
            if ".lora_B." in name:
                factor.normal_(std=0.3, generator=generator)
        self.sent = dict(self.weights)


def test_adapters_are_sent_instead_of_weights_also_under_a_response(cluster: None, policy: Path) -> None:
    config = RolloutConfig(
        workers=1, cpus=0.1, max_model_len=640, max_new_tokens=32, kv_cache_gib=0.1, start_timeout_s=600
    )  # fmt: skip
    low_rank = LoRAConfig(r=4, alpha=12)
    learner = AdapterLearner(policy, low_rank)
    with closing(RolloutFleet(str(policy), config, seed=1, placement_timeout_s=30, lora=low_rank)) as fleet:
        fleet.wait_ready()
        sync = FleetWeightSync(learner, fleet, LearnerConfig(lora=low_rank))
        assert asyncio.run(sync.push(0)).probe_gap < 1e-4
        learner.train(seed=1)
        first = asyncio.run(sync.push(1))
        learner.policy_version = 1
        assert first.probe_gap < 1e-4
        num_bytes = 4 * sum(p.numel() for p in learner.weights.values())
        assert first.bytes == num_bytes < 4 * sum(p.numel() for p in learner.model.parameters()) / 5
        old = [logprobs_of(learner.model, prompt(9, 64).prompt_ids, temperature=1.0)]
        with ThreadPoolExecutor() as pool:
            under_way = pool.submit(sample, fleet, [prompt(i) for i in range(4)], 3, 600)
            wait_for_tokens(fleet)
            learner.train(seed=2)
            assert asyncio.run(sync.push(2)).probe_gap < 1e-4
            rollouts = [r for group in under_way.result() for r in group]
        assert np.abs(logprobs_of(learner.model, prompt(9, 64).prompt_ids, temperature=1.0) - old).max() > 0.1
        for r in (crossed := [r for r in rollouts if len(r.policy_versions) == 2]):
            (_, switch, before), (_, end, after) = r.policy_versions
            expected = logprobs_of(
                learner.model, np.concatenate([r.prompt_ids, r.response_ids]), temperature=TEMPERATURE
            )
            gaps = np.abs(expected[len(r.prompt_ids) - 1 :] - r.rollout_logprobs)
            assert (before, after) == (1, 2)
            assert gaps[switch:end].max() < 1e-3 < gaps[:switch].max()
        assert crossed
        now = sample(fleet, [prompt(0)])[0]
        assert largest_gap(learner.model, now) < 1e-4
        assert now[0].policy_versions[0][2] == 2
        learner.train(seed=3)
        learner.sent["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"] = torch.zeros(128, 4)
        with pytest.raises(RunStopped, match=r"version 3 of the weights, sent twice: .* has other logprobs"):
            asyncio.run(sync.push(3))
        learner.train(seed=3)
        assert asyncio.run(sync.push(4)).probe_gap < 1e-4


def test_the_probe_catches_a_tensor_that_was_not_updated(
    fleet: RolloutFleet, policies: tuple[LlamaForCausalLM, LlamaForCausalLM]
) -> None:
    old, new = policies
    learner = TorchLearner(new, stale="model.layers.1.mlp.down_proj.weight", before=old)
    with pytest.raises(
        RunStopped,
        match=r"version 9 of the weights, sent twice: rollout worker 0 has other logprobs",
    ):
        push(learner, fleet, 9)
    assert push(TorchLearner(old), fleet, 10).probe_gap < 1e-4


def test_prompts_that_do_not_fit_are_refused_with_their_name_and_length(fleet: RolloutFleet) -> None:
    with pytest.raises(UserError, match=r"prompt p1 has 609 tokens: with 32 new ones .* window of 640"):
        sample(fleet, [prompt(1, length=609)])
    with pytest.raises(UserError, match="prompt p2 has no tokens"):
        sample(fleet, [prompt(2, length=0)])


def test_half_a_sync_is_refused_and_the_next_whole_one_mends_it(
    fleet: RolloutFleet, policies: tuple[LlamaForCausalLM, LlamaForCausalLM]
) -> None:
    old, new = policies
    with pytest.raises(LearnerLost):
        push(TorchLearner(new, lost_at=1), fleet, 11)
    assert not fleet.serving()
    withheld = TorchLearner(new, withheld="model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(RunStopped, match=r"1 of 20 tensors .* are missing \(model\.layers\.0\.self_attn\.k_proj"):
        push(withheld, fleet, 11)
    assert push(TorchLearner(old), fleet, 12).probe_gap < 1e-4
    assert largest_gap(old, sample(fleet, [prompt(0)])[0]) < 1e-4


class GlooLearner(TorchLearner):
    """Broadcasts as rank 0 of a learner on GPUs does, but for gloo in NCCL's place."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.sender = NcclSender()

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", free_port()  # another process cannot take it for an outgoing connection

    def stream_weights(self, dtype: str, *, full: bool, rendezvous: Rendezvous | None) -> Iterator[Bucket]:
        """Runs ahead as Ray's generators do: what follows a yield is the broadcast."""
        assert rendezvous is not None
        with ThreadPoolExecutor(max_workers=1) as rank:
            buckets: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
            done = rank.submit(self._send_all, dtype, rendezvous, buckets.put)
            done.add_done_callback(lambda _: buckets.put(None))
            yield from iter(buckets.get, None)
            done.result()

    def _send_all(self, dtype: str, rendezvous: Rendezvous, put: Callable[[Bucket], None]) -> None:
        sender = self.sender
        sender.join_group(rendezvous, torch.device("cpu"))
        for index, names in enumerate(plan_buckets(self.get_manifest(), dtype=dtype, bucket_bytes=2**17)):
            if index == self.lost_at:
                raise LearnerLost("learner rank 0 died during stream_weights")
            for bucket in sender.send(index, names, [self.sent[name] for name in names], time.monotonic()):
                put(bucket)


class Remote:
    """A worker in this process, seen as Ray shows one elsewhere."""

    def __init__(self, worker: GlooWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self._worker, name))


class OneEngine:
    """An `EngineFleet` of one worker. `heard`: the version that it has, or why it has none."""

    config = RolloutConfig(max_model_len=640)
    vocab_size = BYTE_VOCABULARY
    baseline_gap = None

    def __init__(self, worker: GlooWorker) -> None:
        self.worker = SimpleNamespace(name="w", handle=Remote(worker), syncing=False, has_begun_update=False)
        self.heard = []

    def begin_sync(self) -> list[SimpleNamespace]:
        return [self.worker]

    async def request(self, target: Any, submit: Callable[[Any], Any], what: str) -> Any:
        return await submit(target.handle)

    def record_verified(self, target: Any, version: int) -> None:
        self.heard.append(version)

    def record_missed_sync(self, target: Any, reason: str, *, timed_out: bool = False) -> None:
        self.heard.append(reason)

    def record_aborted_sync(self, target: Any, reason: str) -> None:
        self.heard.append(reason)


async def broadcast_thrice(worker: GlooWorker, old: LlamaForCausalLM, new: LlamaForCausalLM) -> list[Rollout]:
    """What it samples of prompt 0 at the end."""
    config = LearnerConfig(sync_transport="nccl")
    fleet = OneEngine(worker)
    sync = FleetWeightSync(learner := GlooLearner(new), fleet, config)
    first = await sync.push(1)
    group = learner.sender._group
    again = await sync.push(1)
    print(f"broadcast {again.seconds * 1000:.0f} ms, {again.num_calls} calls, probe gap {again.probe_gap:.1e}")
    assert first.probe_gap < 1e-4 and again.probe_gap < 1e-4
    assert learner.sender._group is group, "nobody had to meet again"
    assert again.num_calls == first.num_calls - 2, "nobody had to meet again"
    fleet.heard.pop()
    with pytest.raises(LearnerLost):
        await FleetWeightSync(GlooLearner(old, lost_at=1), fleet, config).push(2)
    assert (await FleetWeightSync(GlooLearner(old), fleet, config).push(3)).probe_gap < 1e-4
    assert fleet.heard == [1, "the transfer was aborted: learner rank 0 died during stream_weights", 3]
    sampling = Sampling(num_samples=4, temperature=TEMPERATURE, max_new_tokens=32, seed=1)
    requests = prompt(0).prompt_id, prompt(0).prompt_ids, sampling
    rollouts = await asyncio.gather(*(worker.sample(*requests, index) for index in range(sampling.num_samples)))
    assert largest_gap(old, rollouts) < 1e-4
    assert all(r.policy_versions == ((0, len(r.response_ids), 3),) for r in rollouts)
    return rollouts


def test_a_real_engine_takes_a_broadcast_and_after_half_a_sync_the_next(
    fleet: RolloutFleet,
    policy: Path,
    policies: tuple[LlamaForCausalLM, LlamaForCausalLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole way of sync_transport=nccl, with vLLM's own packing and engine; what is not here is NCCL and a GPU.

    Then two engines have one policy, and sample the same: whoever takes a lost engine's prompts gives its answers.
    """
    old, new = policies
    push(TorchLearner(old), fleet, 20)
    expected = sample(fleet, [prompt(0)])[0]
    for name, value in engine_environment(fleet.config, owner=os.getpid(), receives_weights=True).items():
        monkeypatch.setenv(name, value)  # the engine would set them for good
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    worker = GlooWorker(str(policy), fleet.config, seed=1, transport="nccl")

    async def run() -> list[Rollout]:
        await worker.start()
        try:
            return await broadcast_thrice(worker, old, new)
        finally:
            worker.stop()

    with cpu_streams():
        rollouts = asyncio.run(run())
    for a, b in zip(rollouts, expected, strict=True):
        np.testing.assert_array_equal(a.response_ids, b.response_ids)


def test_an_actor_dies_with_its_core(fleet: RolloutFleet) -> None:
    """Last: nobody can use the engine any more. That a core dies with its actor is in test_demo_job."""
    (core,) = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in title(p)]
    actor = core.parent()
    core.kill()
    assert not psutil.wait_procs([actor], timeout=10)[1]
