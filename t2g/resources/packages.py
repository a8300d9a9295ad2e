"""The optional packages that a config needs."""

from importlib.util import find_spec

import fsspec

from t2g.config import AnyJob

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # by kind of URL


def find_mirror_problem(job: AnyJob) -> str | None:
    """Return a sentence if no installed package can write to run.mirror."""
    url = job.run.mirror
    if url is None:
        return None
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        package = PACKAGES.get(protocol)
        remedy = f"uv pip install {package}" if package else "fsspec has no other package for it"
        return f"run.mirror={url}: {error} ({remedy})"
    return None


def find_absent_scorer(job: AnyJob) -> list[str]:
    """Return a sentence if the package of `bertscore` is needed and not installed."""
    if getattr(job, "bertscore", None) and find_spec("bert_score") is None:
        return [
            "bertscore is set, and its package is not installed: `uv pip install bert-score==0.3.13`, or take it out"
        ]
    return []


def find_absent_trackers(job: AnyJob) -> list[str]:
    """Return a sentence for each tracker whose package is not installed."""
    absent = [name for name in job.log_options.trackers if find_spec(name) is None]
    return [
        f"log.trackers has {name}, whose package is not installed: `uv pip install {name}`, or take it out"
        for name in absent
    ]
