"""Which pods the workers of a config need: one worker group for each role, pods of equal workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd

from t2g.config import EngineConfig, JobConfig, PolicyJob, ProcessConfig, RewardJob, WorkersConfig
from t2g.errors import UserError

GPUS_PER_POD = 8  # of one node: pods do not span nodes
WORKERS_PER_POD = 8
ROLE_LABEL = "rl/role"
# Section of the config -> the role's name, on pods and in their labels.
NAMES = {
    "learner": "learner", "sft": "learner", "learner.critic_ranks": "critic", "rollout": "rollout",
    "feedback.engine": "reward", "annotate.engine": "reward", "engine": "reward",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PodGroup:
    """Pods of one role, each with the same number of its workers, so that bounds of workers are bounds of pods."""

    name: str  # learner, critic, rollout or reward
    section: str  # of the config
    role: ProcessConfig
    workers: WorkersConfig  # a gang has all three equal
    per_pod: int
    later: bool = False  # when the others have gone: the autoscaler starts its pods

    @property
    def elastic(self) -> bool:
        return isinstance(self.role, EngineConfig)

    @property
    def pods(self) -> WorkersConfig:
        return WorkersConfig(**{name: count // self.per_pod for name, count in self.workers})

    @property
    def gpus(self) -> int:
        """Of one pod; whole ones."""
        return ceil(self.per_pod * self.role.gpus)

    @property
    def cpus(self) -> int:
        """Logical CPUs of one pod, as Ray counts them: whole ones."""
        return ceil(self.per_pod * self.role.cpus)

    @property
    def labels(self) -> dict[str, str]:
        """Ray labels of the pods: what the role's selector asks for, and the role's own name in any case."""
        return {ROLE_LABEL: self.name} | self.role.labels


def pod_groups(config: JobConfig) -> tuple[PodGroup, ...]:
    """Of a job: learner, critic where it has ranks of its own, rollout, and reward where a model of ours gives the
    feedback.

    UserError for a worker that fits into no pod.
    """
    found = config.roles()
    if isinstance(config, RewardJob):
        found["engine"] = config.engine
    if shares_gpus(config):  # each has a part of a GPU: an engine and a rank together have a whole
        found |= {section: found[section].model_copy(update={"gpus": 1}) for section in ("rollout", "learner")}
    return tuple(_group(name, section, found[section]) for section, name in NAMES.items() if section in found)


def shares_gpus(config: JobConfig) -> bool:
    """Whether engines are on the ranks' GPUs."""
    return isinstance(config, PolicyJob) and config.cluster.gpu_sharing != "none"


def _group(name: str, section: str, role: ProcessConfig) -> PodGroup:
    if role.gpus > GPUS_PER_POD:
        raise UserError(f"{section}.gpus is {role.gpus:g}, and a pod has at most {GPUS_PER_POD}; lower it")
    for key, value in role.labels.items():
        if not value.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise UserError(f"{section}.labels: {key} is {value!r}; pods need a plain value, without ! or in(...)")
    count = role.num_processes
    workers = role.workers if isinstance(role, EngineConfig) else WorkersConfig(initial=count, min=count, max=count)
    per_pod = workers_per_pod(workers, role.gpus)
    return PodGroup(name=name, section=section, role=role, workers=workers, per_pod=per_pod, later=section == "engine")


def workers_per_pod(workers: WorkersConfig, gpus: float) -> int:
    """The most workers of `gpus` each that share a pod, such that min, initial and max are whole numbers of pods.

    12 at the start, 12 to 32, of 2 GPUs: 4 fit on 8 GPUs and divide 12 and 32, so 3 pods of 8 GPUs, 3 to 8.
    1 to 4 of 1 GPU: a pod each, for the fleet to grow by ones.
    """
    most = most_per_pod(gpus)
    common = gcd(workers.min, workers.initial, workers.max)
    return max(count for count in range(1, most + 1) if common % count == 0)


def most_per_pod(gpus: float) -> int:
    return min(WORKERS_PER_POD, int(GPUS_PER_POD // max(gpus, 1)))


def satisfies(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with `labels` may hold a worker with `selector`; with an empty one, every node may.

    Equality; Ray's operators (!value, in(...), !in(...)) count as fulfilled: better silent than wrong.
    """
    return all(value.startswith(("!", "in(")) or labels.get(key) == value for key, value in selector.items())
