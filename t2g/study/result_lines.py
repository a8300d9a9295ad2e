"""Finished runs of a comparison as JSON lines, so that it can go on where the folders of its runs are not kept.

A line belongs to a run if settings and data are equal, and feedback and task have equal names. The code behind these
names is not compared, and of a local `model.policy` only the end of its path: a start that was trained again may have
other weights. A line has their hash, and a warning says where it is another. `compare.results=FILE` names another file,
and with it all runs are made again.
"""

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from t2g.config import PolicyJob
from t2g.config.comparing import CompareConfig
from t2g.errors import UserError
from t2g.runs.control import now
from t2g.runs.identity import Identity
from t2g.runs.journal import Journal, read_journal
from t2g.runs.versions import collect_versions
from t2g.study.comparison import RunCurve
from t2g.study.policy_eval import content_key

MODEL = "model.policy"

logger = logging.getLogger(__name__)


class ResultLine(BaseModel):
    """A finished run."""

    method: str
    seed: int
    lr: float
    key: str  # see `ResultLines._make_key`
    start: str | None = None  # hash of the weights behind a local model.policy; None: a hub's, or not recorded
    held_out: str | None = None  # "others": the held-out prompts of the rate search; None: those that are reported on
    date: str
    minutes: float  # minutes of the whole run, evaluations included
    versions: dict[str, str]
    run: RunCurve


class ResultLines:
    """The runs in the file `compare.results`; none without a file.

    Raises:
        UserError: The file has a broken line, or its folder cannot be made.
    """

    def __init__(self, config: CompareConfig) -> None:
        self._config = config
        self._lines: dict[str, ResultLine] = {}
        self._has_warned = False
        if config.results is None:
            return
        try:
            config.results.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"compare.results={config.results}: its folder cannot be made: {error}") from error
        self._lines = {line.key: line for line in read_journal(config.results, ResultLine)}

    def find(self, method_job: PolicyJob, **identity_extras: Any) -> RunCurve | None:
        """Return the figures of a run, or None. identity_extras: See `Identity.from_config`."""
        if not self._lines:  # the key would hash the run's data
            return None
        identity = Identity.from_config(method_job, **identity_extras)
        line = self._lines.get(self._make_key(method_job, identity))
        if line is None:
            return None
        self._check_start(line, identity.contents.get(MODEL))
        return line.run

    def _check_start(self, line: ResultLine, start: str | None) -> None:
        """Log a warning, once, if a run is not known to have begun from the weights that new runs begin from."""
        if self._has_warned or start is None or line.start == start:
            return
        self._has_warned = True
        logger.warning(
            "compare.results=%s: %s with seed %d began from the weights %s, and model.policy has %s now: paired with a "
            "new run it does not compare the methods alone",
            self._config.results, line.method, line.seed, line.start or "(not recorded)", start,
        )  # fmt: skip

    def append(
        self, method: str, method_job: PolicyJob, run: RunCurve, *, seconds: float, **identity_extras: Any
    ) -> None:
        """Append the line of a finished run, if there is a file. identity_extras: See `Identity.from_config`."""
        if self._config.results is None:
            return
        identity = Identity.from_config(method_job, **identity_extras)
        today = now().date().isoformat()
        minutes = round(seconds / 60, 1)
        lr = method_job.learner.policy.lr
        line = ResultLine(
            method=method,
            seed=method_job.run.seed,
            lr=lr,
            key=self._make_key(method_job, identity),
            start=identity.contents.get(MODEL),
            held_out=identity_extras.get("held_out"),
            date=today,
            minutes=minutes,
            versions=collect_versions(),
            run=run,
        )
        with closing(Journal(self._config.results)) as journal:
            journal.append(line)

    def _make_key(self, method_job: PolicyJob, identity: Identity) -> str:
        """Return a hash of what decides a run's figures."""
        contents = {key: digest for key, digest in identity.contents.items() if key != MODEL}
        retention = self._config.retention
        texts = retention and (Path(retention.name).name, retention.columns, retention.limit)
        model = Path(method_job.model.policy).parts[-2:]
        key_parts = [identity.config, contents, model, self._config.reference_prompts, texts]
        choices = self._config.choices
        if choices is not None:  # keys of results without questions stay
            key_parts.append((Path(choices.name).name, choices.columns, choices.limit))
        return content_key(*key_parts)
