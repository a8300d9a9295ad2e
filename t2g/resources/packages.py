"""The optional packages that a config needs."""

import fsspec

from t2g.config import AnyJob

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # kind of URL -> extra that brings its package


def find_mirror_problem(job: AnyJob) -> str | None:
    """Return a sentence if no installed package can write to run.mirror."""
    url = job.run.mirror
    if url is None:
        return None
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(protocol)
        remedy = f"install the extra `{extra}`" if extra else "fsspec has no other package for it"
        return f"run.mirror={url}: {error} ({remedy})"
    return None
