"""The job `jobs.annotate`: judgements of responses, from its config to its files."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jobs.common.cli import install_stop_flag, print_outputs
from t2g.config import AnnotateJob

READ_SAMPLES = "jobs.annotate.annotation_runs:read_samples"  # late: it imports numpy


def complete_annotation(config: AnnotateJob, samples: Any) -> Path:
    """Request the missing judgements, write the files and return that of all records. samples: of `read_samples`."""
    from jobs.annotate import annotation_runs as runs

    with ExitStack() as opened:
        fleets = None
        if config.roles() and _has_requests(config, samples):
            from jobs.common.fleets import Fleets, on_cluster

            opened.enter_context(on_cluster(config))
            fleets = opened.enter_context(Fleets())
        runs.annotate_samples(config, samples, fleets, install_stop_flag())
    folder = config.run.folder
    records = folder / runs.ANNOTATED_FILE
    print_outputs(records=records, training=folder / runs.TRAIN_FILE, held_out=folder / runs.HELDOUT_FILE)
    return records


def _has_requests(config: AnnotateJob, samples: Any) -> bool:
    """Return whether the journal lacks judgements; a smoke run makes all of its own."""
    from jobs.annotate import annotation_runs as runs

    if config.run.smoke:
        return True
    records = runs.known_records(config, samples)
    return bool(runs.missing_samples(samples, records))


def describe(config: AnnotateJob) -> str:
    """Return the description of the job, with the requests to an endpoint if the data is readable. Needs no key."""
    from jobs.annotate import annotation_runs as runs

    needs_endpoint = "llm" in config.annotate.models and not config.roles()
    if needs_endpoint and all(Path(path).is_file() for path in config.data.paths):
        samples = runs.read_samples(config)
        records = runs.known_records(config, samples)
        missing = runs.missing_samples(samples, records)
        runs.print_token_estimate(config, missing)
    return config.describe()
