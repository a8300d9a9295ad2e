"""Run generated code against its tests and return a verdict for each test: `run_solution(code, tests, limits)`.

The package imports nothing of t2g; other packages import only this module. `run` is the caller's side, `box` runs
inside the sandbox, and `start` is the program that forks sandboxes. README.md lists what the sandbox proves.
"""

from t2g.sandbox.config import SandboxConfig
from t2g.sandbox.fork_server import SandboxFailed
from t2g.sandbox.run import MAX_TESTS, MODES, Outcome, Refused, TestResult, choose_mode, find_refusal, run_solution
