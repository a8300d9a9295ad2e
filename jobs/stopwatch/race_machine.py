"""The denominators: what one core and all of them can do at all."""

from collections.abc import Callable

import numpy as np
import torch

from jobs.stopwatch.watch import Bench, Done, Race, Record, Side

MIB = 2**20
BYTES = 256 * MIB
ROWS = 1024  # of the square matrices
PRODUCTS = 16
PASSES = 4


async def measure(bench: Bench) -> list[Record]:
    from actors.weights.buckets import hash_arrays

    source, target = np.ones(BYTES, np.uint8), np.zeros(BYTES, np.uint8)
    copy = side(lambda: np.copyto(target, source), PASSES * BYTES / 1e9, PASSES)
    hashing = side(lambda: hash_arrays(target), PASSES * BYTES / 1e9, PASSES)
    return [
        await bench.race(Race(name="machine, memory", unit="GB", sides={"memcpy": copy, "xxh3": hashing})),
        await bench.race(Race(name="machine, bfloat16 matrix product", unit="GFLOP", sides=products())),
    ]


def side(work: Callable[[], object], amount: float, times: int) -> Side:
    async def run() -> Done:
        for _ in range(times):
            work()
        return Done(amount=amount)

    return run


def products() -> dict[str, Side]:
    left, right = (torch.ones(ROWS, ROWS, dtype=torch.bfloat16) for _ in range(2))

    def on(threads: int) -> Side:
        def work() -> None:
            torch.set_num_threads(threads)
            for _ in range(PRODUCTS):
                left @ right

        return side(work, PASSES * PRODUCTS * 2 * ROWS**3 / 1e9, PASSES)

    return {f"{threads} thread{'s' if threads > 1 else ''}": on(threads) for threads in (1, 2)}
