"""On which GPUs engines and ranks can run, and which weight transports work between them."""

from t2g.config.common import GpuSharing
from t2g.config.feedback import RolloutConfig
from t2g.config.learning import LearnerConfig


def check_gpus(rollout: RolloutConfig, learner: LearnerConfig, sharing: GpuSharing) -> None:
    """Raise ValueError if learner.sync_transport or cluster.gpu_sharing cannot work on these GPUs."""
    transport = learner.sync_transport
    engine = rollout.gpus
    rank = learner.gpus
    gpus = f"got rollout.gpus={engine:g} and learner.gpus={rank:g}"
    if (transport == "ipc") != (sharing != "none"):
        raise ValueError(
            "cluster.gpu_sharing=split and alternate need learner.sync_transport=ipc, and ipc needs one of them; "
            f"got gpu_sharing={sharing} and sync_transport={transport}"
        )
    if sharing == "alternate" and not (rollout.max_staleness == 0 and learner.offload == "none"):
        raise ValueError(
            "cluster.gpu_sharing=alternate needs rollout.max_staleness=0 and learner.offload=none, "
            f"got {rollout.max_staleness} and {learner.offload}"
        )
    if transport == "store":
        return
    if min(engine, rank) == 0:
        raise ValueError(
            f"learner.sync_transport={transport} needs GPUs on both sides, {gpus}; without them take store"
        )
    if learner.sync_verify == "full":
        raise ValueError(f"learner.sync_verify=full needs sync_transport=store: vLLM's {transport} takes no hashes")
    if transport == "nccl" and min(engine, rank) < 1:
        raise ValueError(
            f"learner.sync_transport=nccl needs a whole GPU for each engine and rank, {gpus}; or take "
            "cluster.gpu_sharing=split"
        )
    if transport != "ipc":
        return
    workers = rollout.workers
    is_one_to_one = workers.min == workers.max == learner.workers and rollout.labels == learner.labels
    if not (_fits_one_gpu(engine, rank, sharing) and is_one_to_one):
        raise ValueError(
            f"cluster.gpu_sharing={sharing} needs one engine and one rank on each GPU: rollout.gpus above 0.5 and "
            "below 1, learner.gpus the rest of 1 (with alternate 1 and 1), rollout.workers from min to max as many as "
            f"learner.workers, the same labels; {gpus}, {workers.min} to {workers.max} engines and "
            f"learner.workers={learner.workers}"
        )


def _fits_one_gpu(engine: float, rank: float, sharing: GpuSharing) -> bool:
    if sharing == "alternate":
        return engine == rank == 1
    return engine > 0.5 and abs(engine + rank - 1) < 1e-6
