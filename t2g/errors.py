"""What ends a job in one sentence, without a traceback: the user's errors, a run that protects itself, a signal."""


class UserError(ValueError):
    """The user's to mend, exit code 2. Says which field or file and line, what it got and what it needs."""


class MissingLocally(UserError):
    """What this machine lacks, and another may have: a file, a folder, a key in the environment."""


class Stopped(Exception):
    """A signal ended the work where it can go on: the same command does."""


class RunStopped(RuntimeError):
    """The run stopped by itself to protect what it has: NaN, failed feedback, a floor of workers. Exit code 3."""


class LearnerLost(RunStopped):
    """A rank of the learner died or does not answer; its group can be started again from the last checkpoint."""


class SamplingFailed(RunStopped):
    """One request that no worker could answer, in the words of each. Training does without it; else the job ends."""


class MissedSync(RuntimeError):
    """A worker that died or refused in a weight sync: it does not have the weights."""
