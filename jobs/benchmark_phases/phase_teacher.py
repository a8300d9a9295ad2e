"""A step with `objective.teacher` beside the same step without, in ABBA order: time, and peak memory of the rank."""

from jobs.benchmark_phases.phase_step import OURS, UNIT, loop_job, running_loop
from jobs.benchmark_phases.timer import Bench, Benchmark, Record

TEACHER = "t2g, with a teacher"


async def measure(bench: Bench) -> list[Record]:
    job = loop_job(bench, {"run.name": "steps-teacher", "objective.teacher": {}})
    async with running_loop(bench, loop_job(bench)) as plain, running_loop(bench, job) as distilling:
        sides = {OURS: plain, TEACHER: distilling}
        benchmark = Benchmark(name="step with a teacher", unit=UNIT, sides=sides, reference=OURS)
        return [await bench.measure(benchmark)]
