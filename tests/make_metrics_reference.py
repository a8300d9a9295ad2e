"""Write t2g/guides/metrics.md: every metric of the registry `t2g.metrics` with its unit and meaning.

    make docs        # or: python tests/make_metrics_reference.py

`test_documents.py` fails where the file is not what the registry says.
"""

from pathlib import Path

from t2g.metrics import METRICS

TARGET = Path(__file__).parent.parent / "t2g" / "guides" / "metrics.md"
INTRO = """\
# Metrics

This file is generated from `t2g/metrics.py` by `make docs`; a test compares the two. `metrics.jsonl` has one line for
each step. [Read a run](05-read-a-run.md) says what to look at first.

- `<role>` stands for `rollout` or `reward`, `<model>` for `policy` or `critic`. The run defines the other names in
  angle brackets.
- A share lies in [0, 1]. A metric that a run does not need is not in its lines.
"""


def format_reference() -> str:
    """Return the content of the file."""
    rows = ["| metric | unit | meaning |", "| --- | --- | --- |"]
    for metric in METRICS.values():
        meaning = metric.meaning.replace("|", "\\|")
        rows.append(f"| `{metric.name}` | {metric.unit} | {meaning} |")
    return "\n".join([INTRO, *rows, ""])


if __name__ == "__main__":
    TARGET.write_text(format_reference(), encoding="utf-8")
