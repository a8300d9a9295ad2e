"""Processes and a node are killed, stopped and broken under a run, on a cluster of labelled nodes: it finishes, and
every prompt was trained on once per epoch or stands in dropped.jsonl. And a run on it grows and shrinks by itself.

The learner is real ZeRO-3 in every case. Engines are real vLLM, but for the tests that say stub.
"""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from breakable_rollout import BreakableRollout
from models import random_model
from processes import title
from ray.cluster_utils import Cluster
from ray_nodes import start_patiently
from stub_engines import BREAK_SYNC, SLOW, StubReward, StubRollout

from actors.cluster.placement import check_placement
from actors.engines.reward import RewardFleet
from actors.engines.rollout import RolloutFleet
from jobs.common.cli import StopFlag
from jobs.common.run_folder import begin_folder
from jobs.train_policy.policy_data import read_data
from jobs.train_policy.policy_training import PolicyTraining
from t2g.config import PolicyJob, loading
from t2g.errors import Stopped
from t2g.loop.scaling import MIN_LEARNER_IDLE, WINDOW_STEPS
from t2g.loop.steps import select_prompts

ROOT = Path(__file__).parents[2]
SEED = 5
NUM_PROMPTS = 8
PROMPTS_PER_STEP = 4  # two steps an epoch
SAMPLES = 2
FAULTS = ("rollout", "reward", "learner", "node", "hang", "half a sync")
STEPS_APART = 2  # from one fault to the next
FAULT_DEADLINE_S = 480


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A cluster and what a fault needs to know of it."""

    cluster: Cluster
    nodes: dict[str, Any]  # by name
    folder: Path
    names: dict[str, str]  # role -> how Ray titles the processes of its workers


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    os.environ.pop("RAY_ADDRESS", None)
    head = {"num_cpus": 2, "include_dashboard": False, "labels": {"rl/role": "reward"}}
    cluster = start_patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    roles = (("a", "rollout"), ("b", "rollout"), ("learner", "learner"))
    nodes = {"reward": cluster.head_node} | {name: add_node(cluster, role) for name, role in roles}
    cluster.wait_for_nodes(timeout=120)
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]  # workers import the stubs by name
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": environ})
    yield Stage(cluster=cluster, nodes=nodes, folder=tmp_path, names={})
    ray.shutdown()
    cluster.global_state.disconnect()  # its threads would ask a head that is gone until the interpreter ends
    cluster.shutdown()


def add_node(cluster: Cluster, role: str) -> Any:
    options = {"num_cpus": 2, "object_store_memory": 2**27, "labels": {"rl/role": role}}
    return start_patiently(lambda: cluster.add_node(**options, wait=False))


def make_job(folder: Path, num_steps: int, **overrides: object) -> PolicyJob:
    random_model(folder / "policy", "llama", seed=1)
    random_model(folder / "reward", "qwen2", seed=2)
    prompts = [json.dumps({"prompt": f"Say what is wrong, {i}."}) for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    health = "{check_interval_s: 0.5, check_timeout_s: 3, max_failures: 2, max_restarts: 4}"
    engine = f"cpus: 0.5, memory_gib: 0.2, start_timeout_s: 240, request_timeout_s: 120, health: {health}"
    rollout = (
        f"{{workers: {{initial: 2, max: 3}}, labels: {{rl/role: rollout}}, max_model_len: 128, "
        f"prompts_per_step: {PROMPTS_PER_STEP}, samples_per_prompt: {SAMPLES}, max_new_tokens: 16, {engine}}}"
    )
    reward_engine = (
        f"{{workers: {{initial: 1, max: 2}}, labels: {{rl/role: reward}}, max_model_len: 2048, "
        f"max_new_tokens: 900, max_critique_chars: 24, max_spans: 1, max_quote_chars: 4, {engine}}}"
    )
    feedback = f"source: reward_model, reward_model: {folder / 'reward'}, max_failed_share: 1.0"
    run = f"{{root: {folder / 'runs'}, name: chaos, seed: {SEED}}}"
    values = {
        "run": run,
        "cluster.placement_timeout_s": 60,
        "model.policy": folder / "policy",
        "data.path": folder / "prompts.jsonl",
        "num_steps": num_steps,
        "rollout": rollout,
        "feedback": f"{{{feedback}, engine: {reward_engine}}}",
        "learner": "{workers: 2, cpus: 0.5, memory_gib: 0.5, labels: {rl/role: learner}, sync_bucket_mib: 0.05, "
        "probe_tolerance: 1.0e+9, step_timeout_s: 120}",
        "checkpoint.every": 1,
        "log.trackers": "[]",
        "log.num_samples": PROMPTS_PER_STEP * SAMPLES,
    }
    values |= overrides
    return loading.load(PolicyJob, ROOT / "configs/own/policy.yaml", [f"{k}={v}" for k, v in values.items()])


def victims(stage: Stage, role: str, *names: str) -> list[psutil.Process]:
    """Processes of this cluster, or of these nodes, whose title begins so."""
    nodes = [stage.nodes[name] for name in names or stage.nodes]
    roots = [psutil.Process(info.process.pid) for node in nodes for info in raylets(node)]
    children = [child for root in roots if root.is_running() for child in root.children(recursive=True)]
    return [process for process in children if title(process).startswith(f"ray::{role}")]


def raylets(node: Any) -> list[Any]:
    return node.all_processes.get("raylet", [])


def do(fault: str, stage: Stage) -> None:
    match fault:
        case "rollout" | "reward" | "learner":
            victims(stage, stage.names[fault])[0].send_signal(signal.SIGKILL)
        case "hang":
            victims(stage, stage.names["rollout"])[0].send_signal(signal.SIGSTOP)
        case "node":
            name = next(n for n in ("a", "b") if victims(stage, stage.names["rollout"], n))
            stage.cluster.remove_node(stage.nodes.pop(name), allow_graceful=False)
        case "the learner's node and an engine":
            victims(stage, stage.names["rollout"])[0].send_signal(signal.SIGKILL)
            stage.cluster.remove_node(stage.nodes.pop("learner"), allow_graceful=False)
            stage.cluster._shutdown_at_exit = False  # its signal handlers cannot be set outside the main thread
            stage.nodes["learner"] = add_node(stage.cluster, "learner")  # as an autoscaler would
        case "half a sync":
            (stage.folder / "policy" / BREAK_SYNC).touch()


def break_things(stage: Stage, run: Path, plan: dict[int, str], done: threading.Event, broken: list[str]) -> None:
    """Each fault once its step is logged, one after the other."""
    for step, fault in sorted(plan.items()):
        while last_step(run) < step:
            if done.wait(0.05):
                return
        do(fault, stage)
        broken.append(fault)


def last_step(run: Path) -> int:
    return max((line["step"] for line in logged(run)), default=-1)


def logged(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def run_through(stage: Stage, job: PolicyJob, plan: dict[int, str], fleets: Callable[[], Any]) -> list[dict[str, Any]]:
    """The run with its faults; its metrics."""
    begin_folder(job)
    data = read_data(job)
    check_placement(job.roles(), timeout_s=60)
    done = threading.Event()
    broken = list[str]()
    chaos = threading.Thread(target=break_things, args=(stage, job.run.folder, plan, done, broken), daemon=True)
    rollouts, feedback = fleets()
    chaos.start()
    try:
        training = PolicyTraining(config=job, data=data, rollouts=rollouts, feedback=feedback, stop=StopFlag())
        summary = training.run()
    finally:
        done.set()
        chaos.join(timeout=30)
    assert broken == [fault for _, fault in sorted(plan.items())]
    assert summary is not None and summary["steps"] == job.num_steps
    check_samples(job, data.prompts)
    return logged(job.run.folder)


def check_samples(job: PolicyJob, prompts: Any) -> None:
    """Each step trained on its own prompts, each sample once, or says in dropped.jsonl which it did without and why.

    Only what was trained on has token rewards.
    """
    samples = [json.loads(line) for line in (job.run.folder / "samples.jsonl").read_text().splitlines()]
    trained = Counter(key_of(r) for r in samples if r["split"] == "train" and "token_rewards" in r)
    path = job.run.folder / "dropped.jsonl"
    dropped = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert all(record["reason"] for record in dropped)
    assert not [r["reason"] for r in dropped if "feedback failed" in r["reason"]], "rewards were waited for"
    without = Counter(key_of(record) for record in dropped)
    for step in range(1, job.num_steps + 1):
        chosen = select_prompts(num_prompts=NUM_PROMPTS, per_step=PROMPTS_PER_STEP, step=step, seed=SEED)
        for prompt_id in (prompts[i].prompt_id for i in chosen):
            unsampled = without.pop((step, prompt_id, None), 0)
            for index in range(SAMPLES):
                key = (step, prompt_id, index)
                assert trained.pop(key, 0) + without.pop(key, 0) + unsampled == 1, key
    assert not trained and not without


def key_of(record: dict[str, Any]) -> tuple[int, str, int | None]:
    return record["step"], record["prompt_id"], record["sample_index"]


class StubRollouts(RolloutFleet):
    actor = StubRollout


class StubRewards(RewardFleet):
    actor = StubReward


class BreakableRollouts(RolloutFleet):
    actor = BreakableRollout


def begin_fleets(
    job: PolicyJob, rollouts: type[RolloutFleet], rewards: type[RewardFleet]
) -> tuple[RolloutFleet, RewardFleet]:
    at = {"seed": SEED, "placement_timeout_s": job.cluster.placement_timeout_s}
    return rollouts(job.model.policy, job.rollout, **at), rewards(job.feedback, read_data(job).task, **at)


def stub_fleets(job: PolicyJob) -> tuple[RolloutFleet, RewardFleet]:
    fleets = begin_fleets(job, StubRollouts, StubRewards)
    for fleet in fleets:
        fleet.wait_ready()
    return fleets


def recovered(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in metrics if name in line]


def test_a_run_on_stub_engines_outlives_every_fault(stage: Stage) -> None:
    order = random.Random(SEED).sample(FAULTS, len(FAULTS))
    plan = {1 + STEPS_APART * i: fault for i, fault in enumerate(order)}
    conversing = {"environment": "stub_engines:Again", "rollout.max_turns": 2}
    job = make_job(stage.folder, max(plan) + STEPS_APART + 1, **conversing)
    stage.names.update(rollout="StubRolloutWorker", reward="StubRewardWorker", learner="LearnerWorker")
    metrics = run_through(stage, job, plan, lambda: stub_fleets(job))
    # The node and the hung worker and the killed one; the missed sync is caught up with and costs no worker.
    assert sum(line.get("rollout/restarts", 0) for line in metrics) >= 3
    assert sum(line.get("reward/restarts", 0) for line in metrics) >= 1
    assert {line["turns/mean"] for line in metrics if line["step"] > 0} == {2}, "each conversation is whole"
    slowest = max(line["time/generate_s"] for line in metrics)
    assert slowest < job.rollout.request_timeout_s, "the hung worker is found by its health checks, not by its requests"
    for name in ("rollout/recovery_s", "reward/recovery_s", "recovery/learner_s"):
        assert all(0 < seconds < FAULT_DEADLINE_S for seconds in recovered(metrics, name))
        assert recovered(metrics, name)
    assert not (stage.folder / "policy" / BREAK_SYNC).exists(), "somebody got half a sync"
    assert not [p for p in victims(stage, "StubRollout") if p.status() == psutil.STATUS_STOPPED]  # killed for good


@pytest.mark.slow
def test_a_run_on_stub_engines_outlives_the_node_that_holds_the_weights(stage: Stage) -> None:
    """An engine's successor asks for weights that are gone with rank 0: the learner is made again and sends its own."""
    job = make_job(stage.folder, 4, **{"rollout.workers.initial": 1})
    stage.names.update(rollout="StubRolloutWorker", reward="StubRewardWorker", learner="LearnerWorker")
    metrics = run_through(stage, job, {1: "the learner's node and an engine"}, lambda: stub_fleets(job))
    for name in ("rollout/recovery_s", "recovery/learner_s"):
        assert recovered(metrics, name)
        assert all(0 < seconds < FAULT_DEADLINE_S for seconds in recovered(metrics, name))


class Grown:
    """A stop flag that holds once the fleet had two workers and has one again; it makes the engines fast between."""

    def __init__(self, run: Path, slow: Path) -> None:
        self._run = run
        self._slow = slow
        self._deadline = time.monotonic() + FAULT_DEADLINE_S

    def __bool__(self) -> bool:
        sizes = [line["rollout/workers"] for line in logged(self._run) if line["step"] > 0]
        if 2 in sizes:
            self._slow.unlink(missing_ok=True)
        return (2 in sizes and sizes[-1] == 1) or time.monotonic() > self._deadline


@pytest.mark.slow
def test_a_run_on_stub_engines_grows_while_its_learner_starves_and_shrinks_when_samples_pile_up(stage: Stage) -> None:
    scaled = {"rollout.workers": "{min: 1, initial: 1, max: 2}", "rollout.autoscale": "true"}
    job = make_job(stage.folder, 1000, **scaled, **{"rollout.max_staleness": 1})
    (stage.folder / "policy" / SLOW).touch()
    stop = Grown(job.run.folder, stage.folder / "policy" / SLOW)
    rollouts, feedback = stub_fleets(job)
    training = PolicyTraining(config=job, data=read_data(job), rollouts=rollouts, feedback=feedback, stop=stop)
    with pytest.raises(Stopped):
        training.run()
    metrics = [line for line in logged(job.run.folder) if line["step"] > 0]
    sizes = [line["rollout/workers"] for line in metrics]
    grown = sizes.index(2)
    assert sizes[:grown] == [1] * grown
    assert sizes[-1] == 1
    assert set(sizes) == {1, 2}
    waited_s = sum(line["idle/learner"] * line["time/step_s"] for line in metrics[:grown])
    assert waited_s >= MIN_LEARNER_IDLE * sum(line["time/step_s"] for line in metrics[:grown])
    piled = metrics[grown + WINDOW_STEPS - 1 : -1]
    assert any(line["buffer/samples"] >= PROMPTS_PER_STEP * SAMPLES for line in piled)
    assert all(line["dropped/samples"] == 0 and line["rollout/restarts"] == 0 for line in metrics)


@pytest.mark.slow  # test_demo_job has one of them
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_on_real_engines_outlives_a_fault(stage: Stage, fault: str) -> None:
    """With one engine, where half of a sync does not need another: nobody else serves until it is replaced."""
    engines = 2 if fault == "half a sync" else 1
    conversing = {"environment": "stub_engines:Again", "rollout.max_turns": 2} if fault == "rollout" else {}
    # No quote of an untrained reward model occurs in the response: it writes none, and a number is paid.
    paid = {
        "feedback.engine.max_spans": 0,
        "objective.outcome_rewards": "[{source: stub_engines:count_distinct_characters}]",
    }
    changes = {"learner.probe_tolerance": 1e-3, "rollout.workers.initial": engines, **paid, **conversing}
    job = make_job(stage.folder, 4, **changes)
    stage.names.update(rollout="BreakableRolloutWorker", reward="RewardWorker", learner="LearnerWorker")
    with ExitStack() as stack:

        def real() -> tuple[RolloutFleet, RewardFleet]:
            fleets = begin_fleets(job, BreakableRollouts, RewardFleet)
            for fleet in fleets:
                stack.callback(fleet.close)
                fleet.wait_ready()
            return fleets

        metrics = run_through(stage, job, {1: fault}, real)
    assert all(line["sync/probe_gap"] < 1e-3 for line in metrics if line["step"] > 0)
    if fault == "half a sync":
        assert sum(line.get("sync/missed", 0) for line in metrics) == 1
        assert all(line["rollout/restarts"] == 0 for line in metrics), "it caught up"
        return
    name = {"reward": "reward/recovery_s", "learner": "recovery/learner_s"}.get(fault, "rollout/recovery_s")
    assert recovered(metrics, name)
    assert all(0 < seconds < FAULT_DEADLINE_S for seconds in recovered(metrics, name))
