"""The denominators: what one core and all of them can do at all."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear

from jobs.stopwatch.watch import Bench, Done, Race, Record, Side
from t2g.config.describe import count

MIB = 2**20
BYTES = 256 * MIB
ROWS = 1024  # of the square matrices
PRODUCTS = 16
PASSES = 4


async def measure(bench: Bench) -> list[Record]:
    from actors.weights.buckets import hash_arrays

    source, target = np.ones(BYTES, np.uint8), np.zeros(BYTES, np.uint8)
    copy = side(lambda: np.copyto(target, source), BYTES / 1e9)
    hashing = side(lambda: hash_arrays(target), BYTES / 1e9)
    return [
        await bench.race(Race(name="machine, memory", unit="GB", sides={"memcpy": copy, "xxh3": hashing})),
        await bench.race(Race(name="machine, bfloat16 matrix product", unit="GFLOP", sides=products())),
    ]


def side(work: Callable[[], object], amount: float) -> Side:
    """Return the side that does `work` PASSES times. amount: of one pass."""

    async def run() -> Done:
        for _ in range(PASSES):
            work()
        return Done(amount=PASSES * amount)

    return run


def products() -> dict[str, Side]:
    left, right = (torch.ones(ROWS, ROWS, dtype=torch.bfloat16) for _ in range(2))

    def multiply(threads: int) -> None:
        torch.set_num_threads(threads)
        for _ in range(PRODUCTS):
            linear(left, right)  # as in a model; `left @ right` takes minutes on a CPU without bfloat16

    gflop = PRODUCTS * 2 * ROWS**3 / 1e9
    return {count(threads, "thread"): side(partial(multiply, threads), gflop) for threads in (1, 2)}
