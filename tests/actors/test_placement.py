"""Does it fit? Numbers by hand."""

from actors.placement import Supply, describe_shortfall
from t2g.config import RoleConfig

ROLES = {
    "rollout": RoleConfig(workers=2, cpus=0.5, memory_gib=1.5),
    "learner": RoleConfig(workers=1, cpus=1, memory_gib=3),
}


def test_roles_that_fit_exactly_fit() -> None:
    assert describe_shortfall(ROLES, Supply(cpus=2, gpus=0, memory_gib=6)) is None


def test_what_is_missing_is_said_with_every_part() -> None:
    assert describe_shortfall(ROLES, Supply(cpus=2, gpus=0, memory_gib=4)) == (
        "6 GiB of memory needed (rollout 2 x 1.5, learner 1 x 3), 4 free; lower workers or memory_gib"
    )
    assert describe_shortfall(ROLES, Supply(cpus=1, gpus=0, memory_gib=4)) == (
        "2 CPUs needed (rollout 2 x 0.5, learner 1 x 1), 1 free; lower workers or cpus"
    )
    roles = {"rollout": RoleConfig(gpus=1)}
    assert describe_shortfall(roles, Supply(cpus=9, gpus=0, memory_gib=9)) == (
        "1 GPUs needed (rollout 1 x 1), 0 free; lower workers or gpus"
    )
