"""The start of a job that has a policy: its folder, its cluster, its artifacts and its checked data."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from jobs.artifacts.demo_artifacts import demo_of, make_demo_artifacts
from jobs.common.fleets import Fleets, on_cluster
from jobs.common.run_folder import sole_process
from jobs.train_policy.policy_data import PolicyData, drop_failing_references, read_data
from t2g.config import DemoJob, PolicyJob

MakeArtifacts = Callable[[PolicyJob, DemoJob], None]


def make_artifacts(config: PolicyJob, demo: DemoJob) -> None:
    """Make the artifacts that are missing, without a reward model if the job needs none. Ray must be connected."""
    with Fleets() as fleets:
        make_demo_artifacts(demo, fleets, reward="reward_model" in config.feedback.models)


@contextmanager
def prepare_job(
    config: PolicyJob,
    data: PolicyData | None,
    *,
    methods: Sequence[PolicyJob] = (),
    make_artifacts: MakeArtifacts = make_artifacts,
) -> Iterator[PolicyData]:
    """Lock the run folder, connect to the cluster and make missing artifacts; yield the data for the block.

    Args:
        data: What `read_data` returned; None if it is read from the artifacts.
        methods: See `read_data`.

    Raises:
        UserError: The folder is in use, the resources do not suffice, or the data cannot be used.
    """
    demo = demo_of(config)
    with sole_process(config.run.folder), on_cluster(config):
        if demo is not None:
            make_artifacts(config, demo)
        yield drop_failing_references(config, data or read_data(config, methods))
