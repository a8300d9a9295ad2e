"""Diagnose a live cluster from the observations of `actors.cluster.nodes`: a sentence and a remedy for each problem."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from t2g.config import ProcessConfig
from t2g.resources.memory import GIB
from t2g.resources.preflight import matches_selector

MAX_CLOCK_ERROR_S = 2.0  # more than the delay of any message between nodes
OBJECT_STORE = "object_store_memory"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A living node and the result of its inspection."""

    name: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]  # total, with Ray's names; memory in bytes
    versions: Mapping[str, str]  # package -> version, see t2g.runs.versions
    sees_file: bool | None = None  # whether it sees the file that another node wrote; None: not tested
    sandbox: str = ""  # why generated code cannot run there
    shared_bytes: int | None = None  # size of /dev/shm; None: it has none
    clock_error_s: float = 0.0  # by how much its clock is ahead, at the least; below 0: behind
    fault: str = ""  # why it could not be inspected


@dataclass(frozen=True, kw_only=True)
class PendingGroup:
    """A pending placement group; bundle i selects nodes by selectors[i]."""

    name: str
    bundles: tuple[Mapping[str, float], ...]
    selectors: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """A node that cannot connect to a listening port of another node."""

    source: str
    target: str
    reason: str


def diagnose_cluster(
    nodes: Sequence[Node],
    pending: Sequence[PendingGroup],
    roles: Mapping[str, ProcessConfig],
    shared: Path | None,
    unreachable: Sequence[Unreachable] = (),
) -> list[str]:
    """Return a sentence for each problem.

    Args:
        shared: The root folder of all runs.
    """
    faulty = [node for node in nodes if node.fault]
    refusing = [node for node in nodes if node.sandbox]
    sentences = [f"node {node.name} could not be inspected: {node.fault}" for node in faulty]
    sentences += [f"node {node.name}: {node.sandbox}" for node in refusing]
    sentences += _different_versions(nodes)
    sentences += _wrong_clocks(nodes)
    sentences += _small_shared_memory(nodes)
    sentences += _missing_labels(nodes, roles)
    for group in pending:
        reason = why_pending(group, nodes)
        sentences.append(f"placement group {group.name} is pending: {reason}")
    sentences += _not_shared(nodes, shared)
    for pair in unreachable:
        sentences.append(
            f"node {pair.source} does not reach node {pair.target}: {pair.reason}; ranks and engines connect on ports "
            "that the system chooses: open the ports above 1023 between these nodes"
        )
    return sentences


def _missing_labels(nodes: Sequence[Node], roles: Mapping[str, ProcessConfig]) -> Iterator[str]:
    for section, role in roles.items():
        matching = [node for node in nodes if matches_selector(node.labels, role.labels)]
        if role.labels and not matching:
            yield (
                f"no node has the labels {dict(role.labels)} of {section}.labels: start one with `ray start --labels`, "
                "or check that the autoscaler adds such a node when a run requests it"
            )


def why_pending(group: PendingGroup, nodes: Sequence[Node]) -> str:
    """Return why a placement group is pending: a bundle that no node can hold, else that all nodes are in use."""
    for bundle, selector in zip(group.bundles, group.selectors, strict=True):
        labelled = [node for node in nodes if matches_selector(node.labels, selector)]
        if not labelled:
            return f"no node has the labels {dict(selector)}; add such a node, or wait for the autoscaler to add it"
        for resource, need in bundle.items():
            most = max(node.resources.get(resource, 0) for node in labelled)
            if need > most:
                where = f" with the labels {dict(selector)}" if selector else ""
                largest = f"the largest node{where} has {_amount(resource, most)}"
                return f"a bundle needs {_amount(resource, need)}, and {largest}"
        if not any(_has_all(node, bundle) for node in labelled):
            return f"no single node has all that a bundle needs ({_amounts(bundle)})"
    needs = "; ".join(_amounts(bundle) for bundle in group.bundles)
    return f"the nodes that could hold it are in use ({needs}); add one, or wait until another run ends"


def _has_all(node: Node, bundle: Mapping[str, float]) -> bool:
    return all(node.resources.get(resource, 0) >= need for resource, need in bundle.items())


def _different_versions(nodes: Sequence[Node]) -> Iterator[str]:
    inspected = [node for node in nodes if not node.fault]
    packages = set[str]().union(*(node.versions for node in inspected))
    for package in sorted(packages):
        by_version: dict[str, list[str]] = {}
        for node in inspected:
            version = node.versions.get(package, "none")
            by_version.setdefault(version, []).append(node.name)
        if len(by_version) > 1:
            places = []
            for version, names in sorted(by_version.items()):
                places.append(f"{version} on {', '.join(names)}")
            listed = "; ".join(places)
            yield f"{package} differs between nodes: {listed}; use the same image on all nodes"


def _wrong_clocks(nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        error_s = node.clock_error_s
        if abs(error_s) > MAX_CLOCK_ERROR_S:
            direction = "ahead of" if error_s > 0 else "behind"
            yield (
                f"the clock of node {node.name} is {abs(error_s):.1f} s {direction} that of this node: synchronise all "
                "nodes by NTP; ages of files, log lines and certificates are wrong by as much"
            )


def _small_shared_memory(nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        store_bytes = node.resources.get(OBJECT_STORE, 0)
        if node.shared_bytes is not None and store_bytes > node.shared_bytes:
            yield (
                f"node {node.name}: /dev/shm has {node.shared_bytes / GIB:.2f} GiB, and Ray's object store there has "
                f"{store_bytes / GIB:.2f} GiB: Ray keeps it on the disk, and each transfer is as slow; enlarge "
                "/dev/shm (docker run --shm-size, an emptyDir with medium Memory), or start Ray with a smaller "
                "--object-store-memory"
            )


def _not_shared(nodes: Sequence[Node], shared: Path | None) -> Iterator[str]:
    blind = [node.name for node in nodes if node.sees_file is False]
    if blind:
        yield (
            f"{shared} is not shared: a file that another node wrote there is not visible on {', '.join(blind)}; "
            "mount the same volume on all nodes, or put run.root on a shared volume"
        )


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(_amount(resource, need) for resource, need in bundle.items())


def _amount(resource: str, amount: float) -> str:
    if resource == "memory":
        return f"{amount / GIB:.1f} GiB of memory"
    return f"{amount:g} {resource}"
