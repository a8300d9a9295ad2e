"""The word `auto` in a config: what a process gets by what there is where it will run.

    rollout: {gpus: auto, dtype: auto}    # with a GPU {gpus: 1, dtype: bfloat16}, without one the schema's defaults

It is replaced before anything is checked, so that a resolved config, and the identity of a run, have the value.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from t2g.config.words import Keys

KEYS = ("gpus", "dtype", "enforce_eager", "threads", "memory_gib", "gpu_memory_utilization")
UTILIZATION, SPARED = 0.85, 0.9  # of a GPU's memory, by an engine; of the hosts' memory, by all processes
GIB = 2**30


def asked(values: Mapping[str, Any], prefix: Keys = ()) -> Iterator[Keys]:
    """The keys of KEYS that are `auto`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from asked(value, (*prefix, name))
        elif value == "auto" and name in KEYS:
            yield (*prefix, name)


def fill(values: Mapping[str, Any], have: Mapping[str, float]) -> dict[str, Any]:
    """`values` without `auto`; have: GPU, and memory in bytes, as Ray names them.

    Where processes ask for more GPUs than there are, each gets an equal share of one, with which all find a place.

    >>> fill({"rollout": {"gpus": "auto", "workers": 2}, "learner": {"gpus": "auto", "dtype": "auto"}}, {"GPU": 1})
    {'rollout': {'gpus': 0.33, 'workers': 2}, 'learner': {'gpus': 0.33, 'dtype': 'bfloat16'}}
    >>> fill({"rollout": {"gpus": "auto", "workers": 2}, "learner": {"gpus": "auto", "dtype": "auto"}}, {})
    {'rollout': {'workers': 2}, 'learner': {}}
    """
    gpus = int(have.get("GPU", 0))
    share = int(100 / max(1, ceil(_count(values) / gpus))) / 100 if gpus else 0.0
    host_gib = SPARED * have.get("memory", 0) / GIB / max(1, gpus)
    return _fill(values, share, host_gib)


def _count(section: Mapping[str, Any]) -> int:
    """Processes at the start, of sections whose GPUs are asked for."""
    workers = section.get("workers", 1)
    if isinstance(workers, Mapping):
        workers = workers.get("initial", workers.get("min", 1))
    own = workers if section.get("gpus") == "auto" and isinstance(workers, int) else 0
    return own + sum(_count(inner) for inner in section.values() if isinstance(inner, Mapping))


def _fill(section: Mapping[str, Any], share: float, host_gib: float) -> dict[str, Any]:
    gpus = share if section.get("gpus") == "auto" else section.get("gpus", 0)
    chosen: dict[str, Any] = {}
    if isinstance(gpus, int | float) and gpus:
        size = {"memory_gib": round(host_gib * gpus, 1)} if host_gib else {}
        part = round(UTILIZATION * min(gpus, 1), 2)
        chosen = size | {"gpus": gpus, "dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": part}
    filled = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            filled[name] = _fill(value, share, host_gib)
        elif value != "auto" or name not in KEYS:
            filled[name] = value
        elif name in chosen:
            filled[name] = chosen[name]
    return filled
