"""Plan a run on a cluster from its config: pods, manifests, GPU memory, uploads, and reports on the cluster's state.

The package never contacts Ray. Only actors and jobs import it."""

from t2g.deploy.check import check_config
from t2g.deploy.manifests import render_manifests
from t2g.deploy.slurm import render_slurm

__all__ = ["check_config", "render_manifests", "render_slurm"]
