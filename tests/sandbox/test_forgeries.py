"""No wrong solution passes a test in a process of its own, by any mechanism of `forgeries`."""

import pytest
from forgeries import FORGERIES, HEAD, make_tests

from t2g.sandbox import SandboxConfig, run_solution

LIMITS = SandboxConfig(timeout_s=60, cpu_s=60)


@pytest.mark.parametrize("name", FORGERIES)
def test_no_wrong_solution_passes(name: str) -> None:
    code, statements = FORGERIES[name]
    head = HEAD.replace("import numpy as np\n", "").replace("np.array([4.5, 9.0])", "0") if "star" in name else HEAD
    outcome = run_solution(code, make_tests(statements, head), LIMITS)
    assert [statements[n] for n, test in enumerate(outcome.tests) if test.passed] == []
    assert len(outcome.tests) == len(statements)
