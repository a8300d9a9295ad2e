"""Ray's own autoscaler on the manifests, without a cluster: places of our workers fit, and land on their group only."""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from committed import FILES, cluster_spec, documents, read_command
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import BundleSelector, GangResourceRequest
from ray.core.generated.common_pb2 import LabelSelectorOperator

from actors.cluster import placement
from t2g.config import ProcessConfig, with_overrides
from t2g.deploy.pods import PodGroup, pod_groups

Place = tuple[list[dict[str, float]], list[dict[str, str]]]
by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@pytest.fixture
def request_resources(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `actors.cluster.placement` asks Ray for: bundles and their label selectors."""

    def note(bundles: Any, strategy: str, bundle_label_selector: Any, name: str) -> Place:
        assert strategy == "PACK"
        assert name.startswith("learner #")
        return bundles, bundle_label_selector or [{} for _ in bundles]

    monkeypatch.setattr(placement, "placement_group", note)  # Ray itself would want a cluster
    return lambda role: placement.request_placement(role, "learner")


def demand(place: Place) -> GangResourceRequest:
    """A pending placement group, as Ray's control service tells the autoscaler."""
    requests = []
    for bundle, selector in zip(*place, strict=True):
        labels = [(key, LabelSelectorOperator.LABEL_OPERATOR_IN, [value]) for key, value in selector.items()]
        requests.append(ResourceRequestUtil.make(bundle, label_selectors=[labels] if labels else None))
    return GangResourceRequest(requests=requests, bundle_selectors=[BundleSelector(resource_requests=requests)])


def plan(spec: dict[str, Any], places: Sequence[Place]) -> tuple[Counter[str], int]:
    """Pods that the autoscaler starts on an empty cluster, by group, and how many places never come."""
    resource = {"metadata": {"name": "x", "namespace": "default"}, "spec": deepcopy(spec)}
    config = AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(resource), skip_content_hash=True)
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_worker_nodes(),
            gang_resource_requests=[demand(place) for place in places],
        )
    )
    started = Counter({launch.instance_type: launch.count for launch in reply.to_launch})
    return started, len(reply.infeasible_gang_resource_requests)


def places(request_resources: Any, group: PodGroup, workers: int) -> list[Place]:
    """What so many workers of a role ask for: engines one by one, ranks as a gang."""
    if group.elastic:
        return [request_resources(group.role) for _ in range(workers)]
    return [request_resources(with_overrides(group.role, {"workers": workers}))]


def least(groups: Sequence[PodGroup]) -> Counter[str]:
    return Counter({group.name: group.pods.min for group in groups})


@by_file
def test_all_workers_fit(file: Any, request_resources: Any) -> None:
    groups = pod_groups(read_command(file).config)
    needed = [place for group in groups for place in places(request_resources, group, group.workers.max)]
    started, refused = plan(cluster_spec(documents(file.read_text())[1]), needed)
    assert refused == 0
    assert started == Counter({group.name: group.pods.max for group in groups})


@by_file
def test_workers_land_on_their_own_group_and_one_more_than_max_does_not(file: Any, request_resources: Any) -> None:
    spec = cluster_spec(documents(file.read_text())[1])
    groups = pod_groups(read_command(file).config)
    for group in groups:
        expected = least(groups) | Counter({group.name: group.pods.max})
        for extra in (0, 1):
            assert plan(spec, places(request_resources, group, group.workers.max + extra)) == (expected, extra), (
                group.name
            )


@by_file
def test_a_sleeping_cluster_has_its_floor(file: Any) -> None:
    assert plan(cluster_spec(documents(file.read_text())[1]), []) == (least(pod_groups(read_command(file).config)), 0)


def test_without_labels_they_would_land_anywhere(request_resources: Any) -> None:
    (file,) = [file for file in FILES if file.stem == "rayjob"]
    spec = cluster_spec(documents(file.read_text())[1])
    (rollout,) = [group for group in pod_groups(read_command(file).config) if group.name == "rollout"]
    unlabelled: ProcessConfig = with_overrides(rollout.role, {"labels": {}})
    _, refused = plan(spec, [request_resources(unlabelled) for _ in range(rollout.workers.max + 1)])
    assert refused == 0


def test_a_label_that_no_group_has_is_never_served(request_resources: Any) -> None:
    (file,) = [file for file in FILES if file.stem == "rayjob"]
    spec = cluster_spec(documents(file.read_text())[1])
    groups = pod_groups(read_command(file).config)
    stray = with_overrides(groups[1].role, {"labels": {"rl/role": "rolout"}})
    assert plan(spec, places(request_resources, replace(groups[1], role=stray), 1)) == (least(groups), 1)
