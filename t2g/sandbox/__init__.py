"""Generated code and its tests in, a verdict test by test out: `run_solution(code, tests, limits)`.

Self-contained: it imports nothing of t2g, and anybody may import it, by this door. `run` is the caller's side, `box`
what runs inside and `start` the program between them. What is proved and what is not: README.md.
"""

from t2g.sandbox.config import SandboxConfig
from t2g.sandbox.fork_server import SandboxFailed
from t2g.sandbox.run import MAX_TESTS, Mode, Outcome, Refused, TestResult, available, choose_mode, run_solution
