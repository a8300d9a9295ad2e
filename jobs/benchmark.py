"""What a weight sync costs, by stage, beside a plain memory copy of the same bytes in the same run.

    python -m jobs.benchmark --config configs/benchmark/sync.yaml

Real Ray, ZeRO-3 and vLLM; the policy has random weights, and its rank no optimizer, which no sync touches.
"""

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.common.cli import main
from t2g.config import BenchmarkJob, ModelConfig, ShapeConfig, with_overrides
from t2g.errors import RunStopped
from t2g.study.tables import markdown

if TYPE_CHECKING:
    import numpy as np

    from actors.engines.rollout import RolloutFleet
    from actors.learner.learner import LearnerGroup

WORDS = ("one two three four five six seven eight nine ten",)  # for a tokenizer that nothing is written with
POLL_S = 0.5
STAGES = ("open", "gather", "put", "hand_over", "load", "close", "verify")


def run(config: BenchmarkJob) -> None:
    from actors.engines.rollout import RolloutFleet
    from actors.learner.learner import LearnerGroup, LearnerSpec
    from jobs.common.fleets import on_cluster
    from t2g.concurrency import beside

    model = make_model(config.shape, config.run.folder / "model", seed=config.run.seed)
    timeout_s = config.cluster.placement_timeout_s
    spec = LearnerSpec(
        model=ModelConfig(policy=str(model)), learner=config.learner, loss="none", num_updates=0, seed=config.run.seed
    )  # fmt: skip
    with (
        on_cluster(config),
        closing(RolloutFleet(str(model), config.rollout, seed=config.run.seed, placement_timeout_s=timeout_s)) as fleet,
        closing(LearnerGroup(spec, placement_timeout_s=timeout_s)) as learner,
    ):
        fleet.wait_ready()
        results = asyncio.run(beside(measure(config, learner, fleet), fleet.supervise()))
    write(config.run.folder, results)


def make_model(shape: ShapeConfig, folder: Path, *, seed: int) -> Path:
    """Random bfloat16 weights in a Hugging Face folder with a small tokenizer; returns `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from t2g.tasks.tiny.assets import build_tokenizer

    tokenizer = build_tokenizer(folder, WORDS, vocab_size=320)
    fields = shape.model_dump(exclude={"architecture"})
    config = AutoConfig.for_model(
        shape.architecture, **fields, max_position_embeddings=2048, dtype=torch.bfloat16,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


async def measure(config: BenchmarkJob, learner: "LearnerGroup", fleet: "RolloutFleet") -> dict[str, Any]:
    """Everything that `write` shows. Syncs and copies take turns, so that what disturbs one disturbs the other."""
    import numpy as np

    from actors.weights.buckets import num_bytes
    from actors.weights.sync import WeightSync

    dtype = config.rollout.dtype
    size = num_bytes(learner.announce(), dtype)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)  # touched before they are copied
    alone = [learner_alone(learner, dtype) for _ in range(config.repeats)]
    syncs, copies, versions = [], [], itertools.count(1)
    for workers in config.workers:
        fleet.want(workers)
        await until_started(fleet, workers, timeout_s=config.rollout.start_timeout_s)
        for verify in ("probe", "full"):
            sync = WeightSync(learner, fleet, with_overrides(config.learner, {"sync_verify": verify}))
            rows = []
            for _ in range(config.repeats + 1):
                busy = cpu_seconds()
                result = await sync.push(next(versions))
                rows.append(asdict(result) | {"cpu_s": cpu_seconds() - busy})
                if len(fleet.serving()) < workers:
                    missed = ", ".join(result.missed)
                    raise RunStopped(f"version {result.policy_version} of the weights was missed by {missed}")
                copies.append(timed_copy(source, target))
            rows = sorted(rows[1:], key=lambda row: row["seconds"])  # the first one touches new memory
            seconds = [row["seconds"] for row in rows]
            syncs.append({"workers": workers, "verify": verify, **rows[len(rows) // 2], "all_seconds": seconds})
    found = {"bytes": size, "dtype": dtype, "bucket_mib": config.learner.sync_bucket_mib, "syncs": syncs}
    return found | medians(alone) | medians(copies)


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each field."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def cpu_seconds() -> float:
    """That all cores of this machine have worked since it started, for whatever."""
    import psutil

    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def timed_copy(source: "np.ndarray", target: "np.ndarray") -> dict[str, float]:
    """Seconds of the plain copy that a sync is held against, numpy's in one thread, and of one pass of xxh3."""
    from actors.weights.buckets import hash_of

    started = time.monotonic()
    target[:] = source
    copied = time.monotonic()
    hash_of(target)
    return {"copy_s": copied - started, "hash_s": time.monotonic() - copied}


def learner_alone(learner: "LearnerGroup", dtype: str) -> dict[str, float]:
    """Seconds of gathering with its hash, and of the rest of the way into the object store, when nobody loads it."""
    import ray

    started = time.monotonic()
    refs = list(learner.stream_weights(dtype))
    total_s, gather_s = time.monotonic() - started, sum(ray.get(ref).gather_s for ref in refs)
    return {"gather_s": gather_s, "put_s": total_s - gather_s}


async def until_started(fleet: "RolloutFleet", number: int, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while len(fleet.started()) < number:
        if time.monotonic() > deadline:
            raise RunStopped(f"{len(fleet.started())} of {number} rollout engines started within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)


def write(folder: Path, results: dict[str, Any]) -> None:
    """benchmark.json, benchmark.md and the terminal."""
    from t2g.files import write_atomic

    text = tables(results)
    write_atomic(folder / "benchmark.json", json.dumps(results, indent=1).encode())
    write_atomic(folder / "benchmark.md", text.encode())
    print(text)


def tables(results: dict[str, Any]) -> str:
    """Markdown. Rates count the bytes that arrived in all engines; ratios are to the copy's rate."""
    num_bytes, copy_s = results["bytes"], results["copy_s"]

    def ratio(sync: dict[str, Any], seconds: float) -> str:
        return f"{sync['workers'] * copy_s / seconds:.3f}"

    about = (
        f"{num_bytes / 1e9:.3f} GB of {results['dtype']} in buckets of {results['bucket_mib']:g} MiB; a plain copy of "
        f"them takes {copy_s:.3f} s ({num_bytes / copy_s / 1e9:.2f} GB/s), one pass of xxh3 {results['hash_s']:.3f} s."
    )
    whole = markdown(
        (
            "engines", "sync_verify", "seconds", "GB/s", "ratio to the copy", "without the probe", "CPU seconds",
            "control calls", "probe gap, nats",
        ),
        [
            (
                sync["workers"], sync["verify"], f"{sync['seconds']:.3f}",
                f"{sync['workers'] * num_bytes / sync['seconds'] / 1e9:.3f}", ratio(sync, sync["seconds"]),
                ratio(sync, sync["seconds"] - sync["stages"]["verify"]), f"{sync['cpu_s']:.2f}",
                sync["num_calls"], f"{sync['probe_gap']:.2g}",
            )
            for sync in results["syncs"]
        ],
    )  # fmt: skip
    meaning = (
        "Seconds of work by stage, of the slowest engine; gather, put, hand_over and load overlap. gather and put: of "
        "the learner alone."
    )
    by_stage = markdown(
        ("engines", "sync_verify", *STAGES, "sum", "sum / seconds"),
        [_stage_row(sync, results) for sync in results["syncs"]],
    )
    return "\n\n".join((about, whole, meaning, by_stage)) + "\n"


def _stage_row(sync: dict[str, Any], results: dict[str, Any]) -> Sequence[object]:
    stages = sync["stages"] | {"gather": results["gather_s"], "put": results["put_s"]}
    seconds = [stages[stage] for stage in STAGES]
    total = sum(seconds)
    return sync["workers"], sync["verify"], *(f"{s:.3f}" for s in (*seconds, total, total / sync["seconds"]))


if __name__ == "__main__":
    sys.exit(main(BenchmarkJob, run))
