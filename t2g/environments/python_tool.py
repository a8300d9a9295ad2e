"""The tool python: it runs a program in the sandbox and returns what the program prints."""

from t2g.sandbox import Outcome, SandboxConfig, find_refusal, run_solution

TESTS = "import solution\n\ndef test_program():\n    pass\n"
NO_OUTPUT = "The program ended and printed nothing."


class PythonTool:
    """A policy may run programs before it answers. A turn without calls is the answer."""

    def __init__(self, sandbox: SandboxConfig) -> None:
        refusal = find_refusal(sandbox.require)
        if refusal:
            raise ValueError(refusal)
        self._sandbox = sandbox
        self.tools = [self.python]

    def python(self, code: str) -> str:
        """Run a Python program in a process of its own and return what it prints.

        Args:
            code: The program. It has no network and no files of earlier programs.
        """
        outcome = run_solution(code, TESTS, self._sandbox)
        if not outcome.passed:
            raise RuntimeError(describe_failure(outcome, code))
        return outcome.output if outcome.output.strip() else NO_OUTPUT


def describe_failure(outcome: Outcome, code: str) -> str:
    """Return why a program failed, with the line in backticks.

    >>> describe_failure(run_solution("x = [1]\\nprint(x[3])", TESTS, limits), "x = [1]\\nprint(x[3])")
    'IndexError: list index out of range in line 2: `print(x[3])`'
    """
    if not outcome.tests:
        return f"the program failed: {outcome.reason}"
    result = outcome.tests[0]
    message = f"{result.error}: {result.message}"
    lines = code.split("\n")
    number = result.trace[-1] if result.trace else 0
    if not 0 < number <= len(lines):
        return message
    return f"{message} in line {number}: `{lines[number - 1].strip()}`"
