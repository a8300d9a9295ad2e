"""Apply an operator's patches to rendered manifests: strategic merges as in kustomize, from one YAML file.

    metadata: {namespace: team-a}                                  # without a kind: every document
    ---
    kind: Pod                                                      # every pod: head, workers, submitter
    spec: {nodeSelector: {pool: gpu}, imagePullSecrets: [{name: registry}]}
    ---
    kind: RayJob
    metadata: {labels: {kueue.x-k8s.io/queue-name: team-a}}

Mappings are merged. Lists of named items are merged by name. Tolerations are appended. Any other value replaces the
rendered one, and null removes it. `$patch: delete` removes a document.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from t2g.errors import UserError

Document = dict[str, Any]
KINDS = ("PersistentVolumeClaim", "NetworkPolicy", "PodDisruptionBudget", "RayJob", "RayCluster", "Pod")
NAMED_BY = ("groupName", "mountPath", "name")  # merge keys of list items; the first key that all items have is used
TEMPLATES = ("template", "submitterPodTemplate")
DELETE = {"$patch": "delete"}


def read_patches(file: Path) -> list[Document]:
    """Read the patches of a file.

    Raises:
        UserError: The file cannot be read, or has an invalid document.
    """
    try:
        text = file.read_text(encoding="utf-8")
        patches = [patch for patch in yaml.safe_load_all(text) if patch is not None]
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"--patch {file}: {message}") from error
    for number, document in enumerate(patches, start=1):
        if not isinstance(document, dict) or document.get("kind", KINDS[0]) not in KINDS:
            got = document.get("kind") if isinstance(document, dict) else type(document).__name__
            raise UserError(
                f"--patch {file}: document {number} is a {got}; it needs a kind of {', '.join(KINDS)}, or none"
            )
    return patches


def patched(documents: Sequence[Document], patches: Sequence[Document]) -> list[Document]:
    """Apply the patches in order. A patch whose kind is absent has no effect, so that one file serves all targets."""
    result = list(documents)
    for patch in patches:
        kind = patch.get("kind")
        change = {key: value for key, value in patch.items() if key != "kind"}
        if kind == "Pod":
            result = [_patch_pods(document, change) for document in result]
        elif DELETE.items() <= change.items():
            result = [document for document in result if document["kind"] != kind]
        else:
            result = [_patch_kind(document, kind, change) for document in result]
    return result


def _patch_kind(document: Document, kind: str | None, change: Document) -> Document:
    if kind in (None, document["kind"]):
        return merged(document, change)
    return document


def _patch_pods(section: Any, change: Document) -> Any:
    """Return the section with the change applied to every pod template in it."""
    if isinstance(section, list):
        return [_patch_pods(item, change) for item in section]
    if not isinstance(section, dict):
        return section
    result = {}
    for key, value in section.items():
        apply = merged if key in TEMPLATES else _patch_pods
        result[key] = apply(value, change)
    return result


def merged(ours: Any, theirs: Any, key: str = "") -> Any:
    """Merge a patch (`theirs`) into a value (`ours`). key: the name of the value in its mapping.

    >>> merged({"a": 1, "env": [{"name": "X", "value": "1"}]}, {"a": None, "env": [{"name": "X", "value": "2"}]})
    {'env': [{'name': 'X', 'value': '2'}]}
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        changed = {name: merged(ours.get(name), value, name) for name, value in theirs.items()}
        both = ours | changed
        return {name: value for name, value in both.items() if value is not None}
    if isinstance(ours, list) and isinstance(theirs, list):
        if key == "tolerations":
            return [*ours, *theirs]
        name = _merge_key([*ours, *theirs])
        if name:
            changes = {item[name]: item for item in theirs}
            existing = [merged(item, changes.pop(item[name], {})) for item in ours]
            return [*existing, *changes.values()]
    return theirs


def _merge_key(items: Sequence[Any]) -> str | None:
    """Return the first key of NAMED_BY that all items have, or None."""
    for name in NAMED_BY:
        if all(isinstance(item, dict) and name in item for item in items):
            return name
    return None
