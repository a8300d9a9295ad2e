"""Jobs from Python, in a script or a notebook: `train`, `annotate`, `evaluate`.

    from jobs.api import train

    run = train("policy.yaml", prompts=[{"prompt": "Why does bread rise?"}], feedback=judge)
    run.metrics, run.samples, run.policy, run.report

A call does what the command of its name does, and the commands are written on it. It runs inside an event loop and
outside the main thread as well, one job of a process at a time. It raises `t2g.errors`, and never ends the process.
"""

from jobs.api.calls import PolicyRun, annotate, evaluate, train

__all__ = ["PolicyRun", "annotate", "evaluate", "train"]
