"""Measure every phase of a step next to the bare libraries, and a whole step next to TRL.

    python -m jobs.benchmark --config configs/benchmark/all.yaml
    python -m jobs.benchmark --config configs/benchmark/all.yaml 'phases=[step]'    # this again

Real Ray, ZeRO-3 and vLLM on models with random weights, which it makes. benchmark.json keeps each phase as soon as it
is measured, benchmark.md is the table; the same command measures what is missing. What is measured and how:
`jobs.benchmark_phases`.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jobs.common.cli import main, print_outputs
from t2g.config import BenchmarkJob

if TYPE_CHECKING:
    from jobs.benchmark_phases.results import BenchmarkResults


def check_start(config: BenchmarkJob) -> None:
    """Refuse, before anything is started, measurements of another config. Raises UserError."""
    from jobs.benchmark_phases.results import FILE
    from t2g.runs import identity

    if config.run.resume == "never":
        return
    run_identity = identity.Identity.from_config(config)
    identity.load_result(config.run.folder, run_identity, FILE, should_save=False)


def run(config: BenchmarkJob) -> int:
    """Measure all phases; return 3 if a phase failed, after the others."""
    from jobs.benchmark_phases.results import BenchmarkResults
    from jobs.benchmark_phases.timer import check_idle_machine
    from jobs.common.run_folder import sole_process
    from t2g.config.benchmark_job import PHASES

    with sole_process(config.run.folder):
        results = BenchmarkResults(config)
        phases = config.phases or tuple(phase for phase in PHASES if phase not in results.phases)
        exit_code = 0
        if phases:
            check_idle_machine(config.max_busy)
            exit_code = _measure_phases(config, phases, results)
        print(results.table())
    print_outputs(table=config.run.folder / "benchmark.md", numbers=config.run.folder / "benchmark.json")
    return exit_code


def _measure_phases(config: BenchmarkJob, phases: Sequence[str], results: "BenchmarkResults") -> int:
    """Measure these phases on a cluster; return 3 if one failed."""
    import asyncio
    from importlib import import_module

    from jobs.benchmark_phases.timer import Bench
    from jobs.common.fleets import on_cluster
    from t2g.runs.progress import log_duration

    exit_code = 0
    with on_cluster(config):
        bench = Bench(config)
        for phase in phases:
            try:
                with log_duration(f"phase {phase}"):
                    module = import_module(f"jobs.benchmark_phases.phase_{phase}")
                    records = asyncio.run(module.measure(bench))
                results.add(phase, records)
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                exit_code = 3
                reason = f"{type(error).__name__}: {error}"  # some errors have no message
                print(f"phase {phase} was not measured: {reason}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(BenchmarkJob, run, check=check_start))
