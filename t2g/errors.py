"""Errors that are the user's to mend: one sentence, no traceback, exit code 2."""


class UserError(ValueError):
    """Says which field or file and line, what it got and what it needs."""


class RunStopped(RuntimeError):
    """The run stopped by itself to protect what it has: NaN, failed feedback, a floor of workers. Exit code 3."""
