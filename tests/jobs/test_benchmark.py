"""The arithmetic of the sync benchmark's tables."""

import numpy as np

from jobs.benchmark import STAGES, tables, timed_copy

SYNC = {
    "workers": 2, "verify": "probe", "seconds": 2.0, "num_calls": 35, "probe_gap": 1.5e-4, "cpu_s": 4.5,
    "stages": {"open": 0.1, "hand_over": 0.25, "load": 1.0, "close": 0.05, "verify": 0.4},
}  # fmt: skip
RESULTS = {
    "bytes": 1_000_000_000, "dtype": "bfloat16", "bucket_mib": 64.0, "copy_s": 0.1, "hash_s": 0.04, "gather_s": 0.06,
    "put_s": 0.34, "syncs": [SYNC],
}  # fmt: skip


def cells(text: str, line: str) -> list[str]:
    """Of the first row that begins so."""
    row = next(row for row in text.splitlines() if row.startswith(line))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_rates_count_the_bytes_in_all_engines_and_ratios_are_to_the_copy() -> None:
    text = tables(RESULTS)
    assert "a plain copy of them takes 0.100 s (10.00 GB/s)" in text
    # 2 GB in 2 s are 1 GB/s, a tenth of the copy's; without .4 s of the probe 2 GB in 1.6 s
    assert cells(text, "| 2 |") == ["2", "probe", "2.000", "1.000", "0.100", "0.125", "4.50", "35", "0.00015"]


def test_stages_are_summed_and_held_against_the_whole() -> None:
    rows = [cells(row, "|") for row in tables(RESULTS).splitlines() if row.startswith("| 2 |")]
    by_name = dict(zip(["engines", "sync_verify", *STAGES, "sum", "sum / seconds"], rows[1], strict=True))
    assert (by_name["gather"], by_name["put"], by_name["load"]) == ("0.060", "0.340", "1.000")
    assert by_name["sum"] == "2.200" and by_name["sum / seconds"] == "1.100"


def test_the_copy_that_syncs_are_held_against_copies() -> None:
    source, target = np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)
    seconds = timed_copy(source, target)
    assert (source == target).all() and min(seconds["copy_s"], seconds["hash_s"]) > 0
