"""What was measured: benchmark.json, phase by phase, and the table that it makes."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jobs.benchmark_phases.timer import Record
from t2g.config import BenchmarkJob
from t2g.files import write_atomic, write_json
from t2g.runs import identity
from t2g.runs.identity import Identity
from t2g.runs.versions import collect_versions
from t2g.study.tables import NOTHING, markdown

FILE = "benchmark.json"
TABLE_FILE = "benchmark.md"
OWN_COLUMNS = {"seconds", "spread", "cpu_s", "peak_gib", "amount", "rate", "others_cpu_s"}
HEAD = (
    "comparison", "side", "seconds", "a second", "relative rate", "aim", "CPU s", "CPU s / 1,000", "GiB", "reported",
)  # fmt: skip


class BenchmarkResults:
    """The measurements of a run folder."""

    def __init__(self, config: BenchmarkJob) -> None:
        """Load earlier measurements. Raises UserError if the folder has measurements of another config."""
        self._folder = config.run.folder
        run_identity = Identity.from_config(config)
        earlier_results = None
        if config.run.resume != "never":
            earlier_results = identity.load_result(self._folder, run_identity, FILE)
        if earlier_results is None:
            (self._folder / FILE).unlink(missing_ok=True)  # else the next start would take its phases over
            identity.save_identity(self._folder, run_identity)
        self.phases: dict[str, Any] = earlier_results["phases"] if earlier_results else {}

    def add(self, phase: str, records: Sequence[Record]) -> None:
        """Replace a phase's records, and write both files."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self.phases[phase] = {"at": at, "versions": collect_versions(), "comparisons": list(records)}
        write_json(self._folder / FILE, {"phases": self.phases})
        write_atomic(self._folder / TABLE_FILE, self.table().encode())

    def table(self) -> str:
        """Return a Markdown table with a row for each side of each comparison, in order of measurement."""
        rows: list[Sequence[str]] = []
        for phase in self.phases.values():
            comparisons = phase.get("comparisons", phase.get("races", []))  # races: in files of earlier versions
            for comparison in comparisons:
                rows += [_row(comparison, name) for name in comparison["sides"]]
        return markdown(HEAD, rows) + "\n"


def _row(comparison: Record, name: str) -> Sequence[str]:
    sides = comparison["sides"]
    side = sides[name]
    reference = sides.get(comparison["reference"])
    relative_rate = NOTHING
    if reference and side is not reference:
        relative_rate = f"{side['rate'] / reference['rate']:.3f}"
    aims = comparison.get("aims", {})
    aim = f"{aims[name]:.2f}" if name in aims else NOTHING
    cpu_s_per_thousand = 1000 * side["cpu_s"] / side["amount"]
    others = [f"{key} {value:.3g}" for key, value in side.items() if key not in OWN_COLUMNS]
    row = [comparison["name"], name]
    row.append(f"{side['seconds']:.3f} ± {side['spread']:.0%}")
    row.append(f"{side['rate']:,.4g} {comparison['unit']}")
    row += [relative_rate, aim]
    row.append(f"{side['cpu_s']:.2f}")
    row.append(f"{cpu_s_per_thousand:.3g}")
    row.append(f"{side['peak_gib']:.1f}")
    row.append(", ".join(others) or NOTHING)
    return row
