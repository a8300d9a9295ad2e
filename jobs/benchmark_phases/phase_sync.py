"""A weight sync by phase, beside a plain copy of the same bytes; the rank has no optimizer, which no sync touches."""

import asyncio
import itertools
import time
from functools import partial
from typing import Any

import numpy as np
import ray

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from actors.learner.spec import LearnerSpec
from actors.weights.buckets import num_bytes
from actors.weights.sync import FleetWeightSync
from jobs.benchmark_phases.phase_step import loop_job
from jobs.benchmark_phases.timer import Bench, Comparison, Done, Record, Side
from jobs.common.fleets import Fleets, start_learner
from t2g.concurrency import run_with_background
from t2g.config import with_overrides
from t2g.config.describe import format_count
from t2g.errors import RunStopped

AIM = 0.15
POLL_S = 0.5
GB = 1e9


async def measure(bench: Bench) -> list[Record]:
    job = loop_job(bench)
    spec = LearnerSpec(model=job.model, learner=job.learner, loss="none", num_updates=0, seed=job.run.seed)
    with Fleets() as fleets:
        fleet = fleets.rollouts(job.model, job.rollout, job)
        with start_learner(spec, fleet, placement_timeout_s=job.cluster.placement_timeout_s) as learner:
            return await run_with_background(measure_all(bench, learner, fleet), fleet.supervise())


async def measure_all(bench: Bench, learner: LearnerGroup, fleet: RolloutFleet) -> list[Record]:
    config = bench.config
    dtype = config.rollout.dtype
    most = fleet.config.workers.max
    versions = itertools.count(1)
    records: list[Record] = []
    store = config.learner.sync_transport == "store"  # the others take no hashes, and need somebody who receives
    for workers in config.workers:
        if workers > most:
            continue
        fleet.set_target_size(workers)
        await until_started(fleet, workers, timeout_s=config.rollout.start_timeout_s)
        pushes: dict[str, Side] = {}
        for verify in ("probe", "full") if store else ("probe",):
            verifying = with_overrides(config.learner, {"sync_verify": verify})
            sync = FleetWeightSync(learner, fleet, verifying)
            pushes[f"push, {verify}"] = partial(push, sync, fleet, versions)
        size = num_bytes(learner.get_manifest(), dtype)
        source = np.ones(size, np.uint8)  # touched before they are copied
        target = np.zeros(size, np.uint8)
        sides: dict[str, Side] = {"copy": partial(copy, source, target, workers), **pushes}
        if store and workers == config.workers[0]:
            sides["learner alone"] = partial(learner_alone, learner, dtype)
        name = f"sync, {format_count(workers, 'engine')}"
        aims = dict.fromkeys(pushes, AIM)
        comparison = Comparison(name=name, unit="GB", sides=sides, reference="copy", aims=aims)
        records.append(await bench.measure(comparison))
    return records


async def copy(source: np.ndarray, target: np.ndarray, workers: int) -> Done:
    """Copy the bytes for each engine, by numpy in one thread."""
    for _ in range(workers):
        target[:] = source
    return Done(amount=workers * source.size / GB)


async def push(sync: FleetWeightSync, fleet: RolloutFleet, versions: "itertools.count[int]") -> Done:
    result = await sync.push(next(versions))
    if result.missed:
        missed = ", ".join(result.missed)
        raise RunStopped(f"version {result.policy_version} of the weights was missed by {missed}")
    more = {f"{name}_s": seconds for name, seconds in result.timings.items()}
    more |= {"calls": result.num_calls, "probe_gap": result.probe_gap}
    amount = result.bytes * len(fleet.serving()) / GB
    return Done(amount=amount, more=more)


async def learner_alone(learner: LearnerGroup, dtype: Any) -> Done:
    """Measure the gathering with its hash, and the transfer into the object store, without an engine."""

    def stream() -> tuple[float, float]:
        refs = list(learner.stream_weights(dtype))
        gather_s = sum(ray.get(ref).gather_s for ref in refs)
        return gather_s, num_bytes(learner.get_manifest(), dtype) / GB

    started = time.monotonic()
    gather_s, amount = await asyncio.to_thread(stream)
    put_s = time.monotonic() - started - gather_s
    return Done(amount=amount, more={"gather_s": gather_s, "put_s": put_s})


async def until_started(fleet: RolloutFleet, number: int, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while len(fleet.started()) < number:
        if time.monotonic() > deadline:
            raise RunStopped(f"{len(fleet.started())} of {number} rollout engines started within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
