"""A weight sync by stage, beside a plain copy of the same bytes; the rank has no optimizer, which no sync touches."""

import asyncio
import itertools
import time
from functools import partial
from typing import Any

import numpy as np
import ray

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup, LearnerSpec
from actors.weights.buckets import num_bytes
from actors.weights.sync import WeightSync
from jobs.common.fleets import Fleets, loaded_learner
from jobs.stopwatch.race_step import loop_job
from jobs.stopwatch.watch import Bench, Done, Race, Record
from t2g.concurrency import run_with_background
from t2g.config import with_overrides
from t2g.config.describe import count
from t2g.errors import RunStopped

AIM = 0.15
POLL_S = 0.5
GB = 1e9


async def measure(bench: Bench) -> list[Record]:
    job = loop_job(bench)
    spec = LearnerSpec(model=job.model, learner=job.learner, loss="none", num_updates=0, seed=job.run.seed)
    with Fleets() as fleets:
        fleet = fleets.rollouts(job.model, job.rollout, job)
        with loaded_learner(spec, fleet, placement_timeout_s=job.cluster.placement_timeout_s) as learner:
            return await run_with_background(races(bench, learner, fleet), fleet.supervise())


async def races(bench: Bench, learner: LearnerGroup, fleet: RolloutFleet) -> list[Record]:
    config, found, versions = bench.config, [], itertools.count(1)
    dtype, most = config.rollout.dtype, fleet.config.workers.max
    store = config.learner.sync_transport == "store"  # the others take no hashes, and need somebody who receives
    for workers in (number for number in config.workers if number <= most):
        fleet.set_target_size(workers)
        await until_started(fleet, workers, timeout_s=config.rollout.start_timeout_s)
        pushes = {}
        for verify in ("probe", "full") if store else ("probe",):
            sync = WeightSync(learner, fleet, with_overrides(config.learner, {"sync_verify": verify}))
            pushes[f"push, {verify}"] = partial(push, sync, fleet, versions)
        size = num_bytes(learner.get_manifest(), dtype)
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)  # touched before they are copied
        sides = {"copy": partial(copy, source, target, workers), **pushes}
        if store and workers == config.workers[0]:
            sides["learner alone"] = partial(learner_alone, learner, dtype)
        name, aims = f"sync, {count(workers, 'engine')}", dict.fromkeys(pushes, AIM)
        found.append(await bench.race(Race(name=name, unit="GB", sides=sides, reference="copy", aims=aims)))
    return found


async def copy(source: np.ndarray, target: np.ndarray, workers: int) -> Done:
    """Copy the bytes for each engine, by numpy in one thread."""
    for _ in range(workers):
        target[:] = source
    return Done(amount=workers * source.size / GB)


async def push(sync: WeightSync, fleet: RolloutFleet, versions: "itertools.count[int]") -> Done:
    result = await sync.push(next(versions))
    if result.missed:
        raise RunStopped(f"version {result.policy_version} of the weights was missed by {', '.join(result.missed)}")
    timings = {f"{name}_s": seconds for name, seconds in result.timings.items()}
    amount = result.bytes * len(fleet.serving()) / GB
    return Done(amount=amount, more=timings | {"calls": result.num_calls, "probe_gap": result.probe_gap})


async def learner_alone(learner: LearnerGroup, dtype: Any) -> Done:
    """Measure the gathering with its hash, and the transfer into the object store, without an engine."""

    def stream() -> tuple[float, float]:
        refs = list(learner.stream_weights(dtype))
        return sum(ray.get(ref).gather_s for ref in refs), num_bytes(learner.get_manifest(), dtype) / GB

    started = time.monotonic()
    gather_s, amount = await asyncio.to_thread(stream)
    return Done(amount=amount, more={"gather_s": gather_s, "put_s": time.monotonic() - started - gather_s})


async def until_started(fleet: RolloutFleet, number: int, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while len(fleet.started()) < number:
        if time.monotonic() > deadline:
            raise RunStopped(f"{len(fleet.started())} of {number} rollout engines started within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
