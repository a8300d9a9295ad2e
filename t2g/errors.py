"""What ends a job in one sentence, without a traceback: the user's errors, a run that protects itself, a signal."""


class UserError(ValueError):
    """The user's to mend, exit code 2. Says which field or file and line, what it got and what it needs."""


class Stopped(Exception):
    """A signal ended the work where it can go on: the same command does."""


class RunStopped(RuntimeError):
    """The run stopped by itself to protect what it has: NaN, failed feedback, a floor of workers. Exit code 3."""
