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

    source = np.ones(BYTES, np.uint8)
    target = np.zeros(BYTES, np.uint8)
    gigabytes = BYTES / 1e9
    copy = side(lambda: np.copyto(target, source), gigabytes)
    hashing = side(lambda: hash_arrays(target), gigabytes)
    memory = Race(name="machine, memory", unit="GB", sides={"memcpy": copy, "xxh3": hashing})
    memory_record = await bench.race(memory)
    product = Race(name="machine, bfloat16 matrix product", unit="GFLOP", sides=products())
    return [memory_record, await bench.race(product)]


def side(work: Callable[[], object], amount: float) -> Side:
    """Return the side that does `work` PASSES times. amount: of one pass."""

    async def run() -> Done:
        for _ in range(PASSES):
            work()
        return Done(amount=PASSES * amount)

    return run


def products() -> dict[str, Side]:
    left = torch.ones(ROWS, ROWS, dtype=torch.bfloat16)
    right = torch.ones(ROWS, ROWS, dtype=torch.bfloat16)

    def multiply(threads: int) -> None:
        torch.set_num_threads(threads)
        for _ in range(PRODUCTS):
            linear(left, right)  # as in a model; `left @ right` takes minutes on a CPU without bfloat16

    gflop = PRODUCTS * 2 * ROWS**3 / 1e9
    return {count(threads, "thread"): side(partial(multiply, threads), gflop) for threads in (1, 2)}
