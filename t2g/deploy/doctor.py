"""What is wrong with a live cluster, from what `actors.cluster.nodes` saw of it: sentences that say what to do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from t2g.config import ProcessConfig
from t2g.deploy.pods import satisfies

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Node:
    """One living node; what the look at it found, or why there was none."""

    name: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]  # all it has, as Ray names them; memory in bytes
    versions: Mapping[str, str]  # package -> version, see t2g.runs.versions
    sees_file: bool | None = None  # whether the file that another node wrote is there; None: not looked for
    sandbox: str = ""  # why generated code could not run there
    fault: str = ""  # why it could not be looked at


@dataclass(frozen=True, kw_only=True)
class PendingGroup:
    """A placement group without a place; bundle i selects nodes by selectors[i]."""

    name: str
    bundles: tuple[Mapping[str, float], ...]
    selectors: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """A node from which a port of another, on which somebody listens, cannot be reached."""

    source: str
    target: str
    reason: str


def findings(
    nodes: Sequence[Node],
    pending: Sequence[PendingGroup],
    roles: Mapping[str, ProcessConfig],
    shared: Path | None,
    find_unreachable: Sequence[Unreachable] = (),
) -> list[str]:
    """One sentence for each thing that is wrong. `shared`: the root of all runs."""
    return [
        *(f"node {node.name} could not be looked at: {node.fault}" for node in nodes if node.fault),
        *(f"node {node.name}: {node.sandbox}" for node in nodes if node.sandbox),
        *_different_versions(nodes),
        *(
            f"no node has the labels {dict(role.labels)} of {section}.labels: start one with `ray start --labels`, "
            "or see whether the autoscaler adds one when a run asks for it"
            for section, role in roles.items()
            if role.labels and not any(satisfies(node.labels, role.labels) for node in nodes)
        ),
        *(f"placement group {group.name} is pending: {why_pending(group, nodes)}" for group in pending),
        *_not_shared(nodes, shared),
        *(
            f"node {b.source} does not reach node {b.target}: {b.reason}; ranks and engines meet on ports that the "
            "system picks: open those above 1023 between these nodes"
            for b in find_unreachable
        ),
    ]


def why_pending(group: PendingGroup, nodes: Sequence[Node]) -> str:
    """The first bundle that no node can hold; else that they are all in use."""
    for bundle, selector in zip(group.bundles, group.selectors, strict=True):
        labelled = [node for node in nodes if satisfies(node.labels, selector)]
        if not labelled:
            return f"no node has the labels {dict(selector)}; add one, or wait for the autoscaler to"
        for resource, need in bundle.items():
            most = max(node.resources.get(resource, 0) for node in labelled)
            if need > most:
                where = f" of those with the labels {dict(selector)}" if selector else ""
                amounts = f"{_amount(resource, need)}, and the largest node{where} has {_amount(resource, most)}"
                return f"a bundle needs {amounts}"
        if not any(all(n.resources.get(r, 0) >= need for r, need in bundle.items()) for n in labelled):
            return f"no single node has all that a bundle needs ({_amounts(bundle)})"
    needs = "; ".join(_amounts(bundle) for bundle in group.bundles)
    return f"the nodes that could hold it are in use ({needs}); add one, or wait until another run ends"


def _different_versions(nodes: Sequence[Node]) -> Iterator[str]:
    looked_at = [node for node in nodes if not node.fault]
    for package in sorted({package for node in looked_at for package in node.versions}):
        found: dict[str, list[str]] = {}
        for node in looked_at:
            found.setdefault(node.versions.get(package, "none"), []).append(node.name)
        if len(found) > 1:
            listed = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(found.items()))
            yield f"{package} differs between nodes: {listed}; give them the same image"


def _not_shared(nodes: Sequence[Node], shared: Path | None) -> Iterator[str]:
    blind = [node.name for node in nodes if node.sees_file is False]
    if blind:
        yield (
            f"{shared} is not shared: a file that one node writes there is not seen on {', '.join(blind)}; "
            "mount the same volume on all nodes, or put run.root on one that is"
        )


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(_amount(resource, need) for resource, need in bundle.items())


def _amount(resource: str, amount: float) -> str:
    return f"{amount / GIB:.1f} GiB of memory" if resource == "memory" else f"{amount:g} {resource}"
