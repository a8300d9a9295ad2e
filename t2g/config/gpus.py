"""On which GPUs engines and ranks can be, and how weights get from the ones to the others."""

from t2g.config.feedback import RolloutConfig
from t2g.config.learning import LearnerConfig


def check_gpus(rollout: RolloutConfig, learner: LearnerConfig, *, colocate: bool) -> None:
    """Raises ValueError where learner.sync_transport, or turns with cluster.colocate, cannot work on these GPUs."""
    transport, engine, rank, workers = learner.sync_transport, rollout.gpus, learner.gpus, rollout.workers
    got = f"got rollout.gpus={engine:g} and learner.gpus={rank:g}"
    if colocate and not (transport == "ipc" and rollout.max_staleness == 0 and learner.offload == "none"):
        raise ValueError(
            "cluster.colocate, engines and ranks in turn, needs learner.sync_transport=ipc, rollout.max_staleness=0 "
            f"and learner.offload=none, got {transport}, {rollout.max_staleness} and {learner.offload}"
        )
    if transport == "store":
        return
    if min(engine, rank) == 0:
        raise ValueError(f"learner.sync_transport={transport} needs GPUs on both sides, {got}; without them take store")
    if learner.sync_verify == "full":
        raise ValueError(f"learner.sync_verify=full needs sync_transport=store: vLLM's {transport} takes no hashes")
    if transport == "nccl" and min(engine, rank) < 1:
        raise ValueError(f"learner.sync_transport=nccl needs a whole GPU for each engine and rank, {got}; or take ipc")
    fits = engine == rank == 1 if colocate else engine > 0.5 and abs(engine + rank - 1) < 1e-6
    if transport == "ipc" and not (
        fits and workers.min == workers.max == learner.workers and rollout.labels == learner.labels
    ):
        raise ValueError(
            "learner.sync_transport=ipc needs one engine and one rank on each GPU: rollout.gpus above 0.5 and below 1, "
            "learner.gpus the rest of 1 (with cluster.colocate 1 and 1), rollout.workers from min to max as many as "
            f"learner.workers, the same labels; {got}, {workers.min} to {workers.max} engines and "
            f"learner.workers={learner.workers}"
        )
