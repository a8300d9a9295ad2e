"""What an operator changes of rendered manifests: strategic merges, as kustomize writes them, from one YAML file.

    metadata: {namespace: team-a}                                  # without a kind: of every document
    ---
    kind: Pod                                                      # of every pod: head, workers, submitter
    spec: {nodeSelector: {pool: gpu}, imagePullSecrets: [{name: registry}]}
    ---
    kind: RayJob
    metadata: {labels: {kueue.x-k8s.io/queue-name: team-a}}

Mappings are merged; so are lists of things with a name, by that name; a list of tolerations is added to ours; any other
value takes the place of ours, and null removes it. `$patch: delete` removes a document.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from t2g.errors import UserError

Document = dict[str, Any]
KINDS = ("PersistentVolumeClaim", "NetworkPolicy", "PodDisruptionBudget", "RayJob", "RayCluster", "Pod")
NAMED_BY = ("groupName", "mountPath", "name")  # what tells the things of a list apart; the first that all have
TEMPLATES = ("template", "submitterPodTemplate")
DELETE = {"$patch": "delete"}


def read_patches(file: Path) -> list[Document]:
    """The documents of a file. UserError for one that cannot be read or holds something else."""
    try:
        found = [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document is not None]
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--patch {file}: {' '.join(str(error).split())}") from error
    for number, document in enumerate(found, start=1):
        if not isinstance(document, dict) or document.get("kind", KINDS[0]) not in KINDS:
            got = document.get("kind") if isinstance(document, dict) else type(document).__name__
            raise UserError(
                f"--patch {file}: document {number} is a {got}; it needs a kind of {', '.join(KINDS)}, or none"
            )
    return found


def patched(documents: Sequence[Document], patches: Sequence[Document]) -> list[Document]:
    """A patch of a kind that is not among the documents changes nothing: one file serves all targets."""
    made = list(documents)
    for patch in patches:
        kind, change = patch.get("kind"), {key: value for key, value in patch.items() if key != "kind"}
        if kind == "Pod":
            made = [_each_pod(document, change) for document in made]
        elif DELETE.items() <= change.items():
            made = [document for document in made if document["kind"] != kind]
        else:
            made = [merged(document, change) if kind in (None, document["kind"]) else document for document in made]
    return made


def _each_pod(section: Any, change: Document) -> Any:
    """The section with every pod template in it changed."""
    if isinstance(section, list):
        return [_each_pod(item, change) for item in section]
    if not isinstance(section, dict):
        return section
    return {
        key: merged(value, change) if key in TEMPLATES else _each_pod(value, change) for key, value in section.items()
    }


def merged(ours: Any, theirs: Any, key: str = "") -> Any:
    """
    >>> merged({"a": 1, "env": [{"name": "X", "value": "1"}]}, {"a": None, "env": [{"name": "X", "value": "2"}]})
    {'env': [{'name': 'X', 'value': '2'}]}
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = ours | {name: merged(ours.get(name), value, name) for name, value in theirs.items()}
        return {name: value for name, value in both.items() if value is not None}
    if isinstance(ours, list) and isinstance(theirs, list):
        if key == "tolerations":
            return [*ours, *theirs]
        items = [*ours, *theirs]
        names = (name for name in NAMED_BY if all(isinstance(item, dict) and name in item for item in items))
        if name := next(names, None):
            changes = {item[name]: item for item in theirs}
            kept = [merged(item, changes.pop(item[name], {})) for item in ours]
            return [*kept, *changes.values()]
    return theirs
