"""Errors that end a job with one sentence and no traceback."""


class UserError(ValueError):
    """An error that the user can fix; exit code 2. The message names the field or file, its value and what it needs."""


class MissingLocally(UserError):
    """A file, folder or environment variable that this machine lacks and that another machine may have."""


class Unreadable(UserError):
    """A file or folder that exists and cannot be read now, for example while a mount is unavailable."""


class Stopped(Exception):
    """A signal ended the work; the same command or call continues it."""


class RunStopped(RuntimeError):
    """The run stopped to protect its results: NaN, failed feedback, too few workers. Exit code 3."""


class Diverged(RunStopped):
    """A loss, a gradient or a number of a token is not finite, as with a learning rate that is too high."""


class LearnerLost(RunStopped):
    """A learner rank died or does not answer; its group can be restarted from the last checkpoint."""


class RankFailed(RunStopped):
    """A learner rank failed while others wait for it: no later call can succeed, and a restart would fail likewise."""


class SamplingFailed(RunStopped):
    """A request that no worker could answer, with the error of each worker. Training drops it; other jobs end."""


class MissedSync(RuntimeError):
    """A worker died in a weight sync, or refused it: it does not have the new weights."""
