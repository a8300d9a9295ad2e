"""A step with each use of `objective.teacher` beside the same step without, in ABBA order: time and memory."""

from jobs.benchmark_phases.phase_step import OURS, UNIT, loop_job, start_loop
from jobs.benchmark_phases.timer import Bench, Comparison, Record

TEACHERS = {"distill": "t2g, with a teacher", "scale": "t2g, with a teacher that scales"}  # objective.teacher.use


async def measure(bench: Bench) -> list[Record]:
    """Return one record for each use: three loops at once would need half as much memory again as two."""
    return [await _measure_use(bench, use, side) for use, side in TEACHERS.items()]


async def _measure_use(bench: Bench, use: str, side: str) -> Record:
    job = loop_job(bench, {"run.name": f"steps-{use}", "objective.teacher": {"use": use}})
    async with start_loop(bench, loop_job(bench)) as plain, start_loop(bench, job) as with_teacher:
        sides = {OURS: plain, side: with_teacher}
        comparison = Comparison(name=f"step with a teacher, use={use}", unit=UNIT, sides=sides, reference=OURS)
        return await bench.measure(comparison)
