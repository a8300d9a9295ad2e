"""Plan the pods of a config: one worker group for each role, with equal pods."""

from dataclasses import dataclass
from math import ceil, gcd

from t2g.config import EngineConfig, JobConfig, ProcessConfig, WorkersConfig
from t2g.errors import UserError

GPUS_PER_POD = 8  # GPUs of one node: pods do not span nodes
WORKERS_PER_POD = 8
ROLE_LABEL = "rl/role"
# Section of the config -> name of the role, which pods and their labels have.
NAMES = {
    "learner": "learner", "sft": "learner", "learner.critic_ranks": "critic", "rollout": "rollout", "engine": "reward",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PodGroup:
    """The pods of one role. Each has the same number of workers, so that bounds of workers are bounds of pods."""

    name: str  # learner, critic, rollout or reward
    section: str  # section of the config
    role: ProcessConfig
    workers: WorkersConfig  # initial, min and max are equal for ranks
    per_pod: int
    later: bool = False  # the autoscaler starts its pods after the other groups have ended

    @property
    def elastic(self) -> bool:
        return isinstance(self.role, EngineConfig)

    @property
    def pods(self) -> WorkersConfig:
        return WorkersConfig(**{name: count // self.per_pod for name, count in self.workers})

    @property
    def gpus(self) -> int:
        """Return the GPUs of one pod, a whole number."""
        return ceil(self.per_pod * self.role.gpus)

    @property
    def cpus(self) -> int:
        """Return the logical CPUs of one pod, a whole number, as Ray counts them."""
        return ceil(self.per_pod * self.role.cpus)

    def shared_memory_gib(self, store_gib: float) -> int:
        """Return /dev/shm of one pod: the object store, and 2 GiB a worker for received weights and NCCL's buffers."""
        return ceil(store_gib + 2 * self.per_pod)

    def memory_gib(self, store_gib: float) -> int:
        """Return the memory of one pod, with its /dev/shm and 2 GiB for raylet and agents."""
        workers_gib = self.per_pod * self.role.memory_gib
        return ceil(workers_gib + self.shared_memory_gib(store_gib) + 2)

    @property
    def labels(self) -> dict[str, str]:
        """Return the Ray labels of the pods: the labels that the role selects, and the role's name."""
        return {ROLE_LABEL: self.name} | self.role.labels


def pod_groups(config: JobConfig) -> tuple[PodGroup, ...]:
    """Return the pod groups of a job.

    They are learner, critic if it has its own ranks, rollout, and reward if t2g's own engines serve the feedback model.

    Raises:
        UserError: A worker fits into no pod.
    """
    later_roles = config.later_roles()
    roles = config.roles() | later_roles
    if config.shares_gpus:  # the config has fractions of a GPU; an engine and a rank together have one GPU
        for section in ("rollout", "learner"):
            roles[section] = roles[section].model_copy(update={"gpus": 1})
    names = NAMES | {section: "reward" for section in roles if section.endswith(".engine")}
    groups = []
    for section, name in names.items():
        if section in roles:
            groups.append(_group(name, section, roles[section], is_later=section in later_roles))
    return tuple(groups)


def _group(name: str, section: str, role: ProcessConfig, *, is_later: bool) -> PodGroup:
    if role.gpus > GPUS_PER_POD:
        raise UserError(f"{section}.gpus is {role.gpus:g}, and a pod has at most {GPUS_PER_POD}; lower it")
    for key, value in role.labels.items():
        letters = value.replace("-", "").replace("_", "").replace(".", "")
        if not letters.isalnum():
            raise UserError(f"{section}.labels: {key} is {value!r}; pods need a plain value, without ! or in(...)")
    if isinstance(role, EngineConfig):
        workers = role.workers
    else:
        count = role.num_processes
        workers = WorkersConfig(initial=count, min=count, max=count)
    per_pod = workers_per_pod(workers, role.gpus)
    return PodGroup(name=name, section=section, role=role, workers=workers, per_pod=per_pod, later=is_later)


def workers_per_pod(workers: WorkersConfig, gpus: float) -> int:
    """Return the largest number of workers per pod such that min, initial and max are whole numbers of pods.

    12 at the start, 12 to 32, of 2 GPUs: 4 fit on 8 GPUs and divide 12 and 32, so 3 pods of 8 GPUs, 3 to 8.
    1 to 4 of 1 GPU: a pod for each worker, so that the fleet can grow by one worker.
    """
    most = most_per_pod(gpus)
    common = gcd(workers.min, workers.initial, workers.max)
    divisors = [count for count in range(1, most + 1) if common % count == 0]
    return max(divisors)


def most_per_pod(gpus: float) -> int:
    return min(WORKERS_PER_POD, int(GPUS_PER_POD // max(gpus, 1)))
