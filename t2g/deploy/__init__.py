"""Where a run lives: its pods, manifests and memory, worked out from its config; what goes to a cluster, and what comes
back from one, as text. It never contacts Ray: actors and jobs do, and they alone import it."""

from t2g.deploy.check import check_config
from t2g.deploy.manifests import render_manifests

__all__ = ["check_config", "render_manifests"]
