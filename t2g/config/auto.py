"""The word `auto` in a config: what a process gets by what there is where it will run.

    rollout: {gpus: auto, dtype: auto}    # with a GPU {gpus: 1, dtype: bfloat16}, without one the schema's defaults
    rollout: {threads: auto}              # without a GPU its share of the cores

It is replaced before anything is checked, so that a resolved config, and the identity of a run, have the value.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from t2g.config.words import Keys

KEYS = ("gpus", "dtype", "enforce_eager", "threads", "memory_gib", "gpu_memory_utilization")
UTILIZATION, SPARED = 0.85, 0.9  # of a GPU's memory, by an engine; of the hosts' memory, by all processes
RANKS = ("learner", "sft", "policy_sft", "reward_sft")  # sections whose processes train
GIB = 2**30


def asked(values: Mapping[str, Any], prefix: Keys = ()) -> Iterator[Keys]:
    """The keys of KEYS that are `auto`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from asked(value, (*prefix, name))
        elif value == "auto" and name in KEYS:
            yield (*prefix, name)


def fill(values: Mapping[str, Any], have: Mapping[str, float]) -> dict[str, Any]:
    """`values` without `auto`; have: GPU, CPU (cores of a node), and memory in bytes, as Ray names them.

    Where processes ask for more GPUs than there are, each gets an equal share of one, with which all find a place. On
    CPUs, engines and ranks that work in turn have all cores for their threads, and with `max_staleness` share them.

    >>> fill({"rollout": {"gpus": "auto", "workers": 2}, "learner": {"gpus": "auto", "dtype": "auto"}}, {"GPU": 1})
    {'rollout': {'gpus': 0.33, 'workers': 2}, 'learner': {'gpus': 0.33, 'dtype': 'bfloat16'}}
    >>> fill({"rollout": {"gpus": "auto", "workers": 2}, "learner": {"gpus": "auto", "threads": "auto"}}, {"CPU": 4})
    {'rollout': {'workers': 2}, 'learner': {'threads': 4}}
    """
    gpus = int(have.get("GPU", 0))
    share = int(100 / max(1, ceil(_count(values, "gpus") / gpus))) / 100 if gpus else 0.0
    host_gib = SPARED * have.get("memory", 0) / GIB / max(1, gpus)
    rollout = values.get("rollout")
    in_turn = not (isinstance(rollout, Mapping) and rollout.get("max_staleness"))

    def at_once(one: str, other: str) -> bool:
        """Whether processes of both sections work at the same time; of the trainings only one does."""
        if (one in RANKS) != (other in RANKS):
            return not in_turn
        return one == other or one not in RANKS

    def threads(name: str) -> int:
        """Of a process of this section: its part of the cores, which those share that work while it does."""
        beside = {n: v for n, v in values.items() if at_once(name, n)}
        return max(1, int(have.get("CPU", 1)) // max(1, _count(beside, "threads")))

    return {
        name: _fill(value, share, host_gib, threads(name)) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def _count(section: Mapping[str, Any], key: str) -> int:
    """Processes at the start, of sections in which that is asked for."""
    workers = section.get("workers", 1)
    if isinstance(workers, Mapping):
        workers = workers.get("initial", workers.get("min", 1))
    own = workers if section.get(key) == "auto" and isinstance(workers, int) else 0
    return own + sum(_count(inner, key) for inner in section.values() if isinstance(inner, Mapping))


def _fill(section: Mapping[str, Any], share: float, host_gib: float, threads: int) -> dict[str, Any]:
    gpus = share if section.get("gpus") == "auto" else section.get("gpus", 0)
    chosen: dict[str, Any] = {"threads": threads}
    if isinstance(gpus, int | float) and gpus:
        size = {"memory_gib": round(host_gib * gpus, 1)} if host_gib else {}
        part = round(UTILIZATION * min(gpus, 1), 2)
        chosen = size | {"gpus": gpus, "dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": part}
    filled = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            filled[name] = _fill(value, share, host_gib, threads)
        elif value != "auto" or name not in KEYS:
            filled[name] = value
        elif name in chosen:
            filled[name] = chosen[name]
    return filled
