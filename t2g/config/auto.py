"""The value `auto` in a config: resources chosen by the hardware on which a process will run.

    rollout: {gpus: auto, dtype: auto}    # with a GPU {gpus: 1, dtype: bfloat16}, without one the schema's defaults
    rollout: {threads: auto}              # without a GPU its share of the cores

`auto` is replaced before validation: the resolved config and the identity of a run hold the chosen value.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from t2g.config.validation_errors import Keys

KEYS = ("gpus", "dtype", "enforce_eager", "threads", "memory_gib", "gpu_memory_utilization")
GPU_MEMORY_SHARE = 0.85  # share of a GPU, for an engine
HOST_MEMORY_SHARE = 0.9  # share of a host, for all processes
RANKS = ("learner", "sft", "policy_sft", "reward_sft")  # sections whose processes train
GIB = 2**30


def auto_keys(values: Mapping[str, Any], prefix: Keys = ()) -> Iterator[Keys]:
    """Yield each key of KEYS whose value is `auto`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from auto_keys(value, (*prefix, name))
        elif value == "auto" and name in KEYS:
            yield (*prefix, name)


def resolve_auto(values: Mapping[str, Any], resources: Mapping[str, float]) -> dict[str, Any]:
    """Return `values` with a number or a dtype in place of each `auto`.

    If the processes need more GPUs than there are, each gets an equal share of one GPU. On CPUs, engines and ranks
    that alternate use all cores for their threads; with `max_staleness` above 0 they divide the cores.

    Args:
        values: A config before validation.
        resources: GPU, CPU (cores of a node) and memory in bytes, under Ray's names.

    >>> values = {"rollout": {"gpus": "auto", "workers": 2}, "learner": {"gpus": "auto", "dtype": "auto"}}
    >>> resolve_auto(values, {"GPU": 1})
    {'rollout': {'gpus': 0.33, 'workers': 2}, 'learner': {'gpus': 0.33, 'dtype': 'bfloat16'}}
    >>> values = {"rollout": {"gpus": "auto", "workers": 2}, "learner": {"gpus": "auto", "threads": "auto"}}
    >>> resolve_auto(values, {"CPU": 4})
    {'rollout': {'workers': 2}, 'learner': {'threads': 4}}
    """
    gpus = int(resources.get("GPU", 0))
    share = 0.0
    if gpus:
        processes_per_gpu = max(1, ceil(count_auto(values, "gpus") / gpus))
        share = int(100 / processes_per_gpu) / 100
    host_gib = HOST_MEMORY_SHARE * resources.get("memory", 0) / GIB / max(1, gpus)
    rollout = values.get("rollout")
    alternate = not (isinstance(rollout, Mapping) and rollout.get("max_staleness"))

    def run_together(section: str, other: str) -> bool:
        """Return whether processes of both sections compute at the same time; trainings run one by one."""
        if (section in RANKS) != (other in RANKS):
            return not alternate
        return section == other or section not in RANKS

    def threads(section: str) -> int:
        """Return the cores of a process of this section, shared with those that run at the same time."""
        concurrent = {name: value for name, value in values.items() if run_together(section, name)}
        return max(1, int(resources.get("CPU", 1)) // max(1, count_auto(concurrent, "threads")))

    resolved = dict(values)
    for name, value in values.items():
        if isinstance(value, Mapping):
            resolved[name] = _resolve_section(value, share, host_gib, threads(name))
    return resolved


def count_auto(section: Mapping[str, Any], key: str) -> int:
    """Return the initial number of processes in the sections whose `key` is `auto`."""
    workers = section.get("workers", 1)
    if isinstance(workers, Mapping):
        workers = workers.get("initial", workers.get("min", 1))
    own_workers = workers if section.get(key) == "auto" and isinstance(workers, int) else 0
    return own_workers + sum(count_auto(inner, key) for inner in section.values() if isinstance(inner, Mapping))


def _resolve_section(section: Mapping[str, Any], share: float, host_gib: float, threads: int) -> dict[str, Any]:
    gpus = share if section.get("gpus") == "auto" else section.get("gpus", 0)
    chosen: dict[str, Any] = {"threads": threads}
    if isinstance(gpus, int | float) and gpus:
        memory_share = round(GPU_MEMORY_SHARE * min(gpus, 1), 2)
        chosen = {
            "gpus": gpus,
            "dtype": "bfloat16",
            "enforce_eager": False,
            "gpu_memory_utilization": memory_share,
        }
        if host_gib:
            chosen["memory_gib"] = round(host_gib * gpus, 1)
    filled = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            filled[name] = _resolve_section(value, share, host_gib, threads)
        elif value != "auto" or name not in KEYS:
            filled[name] = value
        elif name in chosen:
            filled[name] = chosen[name]
    return filled
