"""Resolve the artifacts of a policy job before its config exists: paths in their folder, and windows of their models.

    artifacts: configs/tiny/demo.yaml
    model: {policy: "${artifacts}/base/model"}     # becomes /abs/runs/demo/base/model

A job that names a demo config in `artifacts` makes what is missing of them first (`jobs.artifacts`), so that the files
of such a path may not exist yet.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from t2g.config import loading
from t2g.config.base_jobs import AnyJob
from t2g.config.common import RunConfig, with_overrides, with_value_at
from t2g.config.jobs import WINDOWS, DemoJob, PolicyJob
from t2g.errors import UserError

PLACEHOLDER = "${artifacts}"  # in a value of a config: the folder of the demo whose artifacts the job uses
Keys = tuple[str, ...]
FindResources = Callable[[str | None], Mapping[str, float]]  # see `loading.load`


def load_demo(job: PolicyJob, find_resources: FindResources = lambda address: {}) -> DemoJob | None:
    """Return the demo whose artifacts a job uses, under the job's root and on its cluster; None without artifacts.

    Args:
        find_resources: See `loading.load`.

    Raises:
        UserError: The file that `artifacts` names is not the config of a demo.
    """
    if job.artifacts is None:
        return None

    def find_resources_of_job(_: str | None) -> Mapping[str, float]:
        return find_resources(job.cluster.address)

    demo = _load(job.artifacts, job.run.root, find_resources=find_resources_of_job)
    # How the job's engines and ranks share GPUs means nothing to the demo, whose own values may exclude it.
    cluster = with_overrides(job.cluster, {"gpu_sharing": demo.cluster.gpu_sharing})
    run = job.run
    return with_overrides(demo, {"cluster": cluster, "run.accept": run.accept, "run.resume": run.resume})


def find_artifacts(job: AnyJob) -> Path | None:
    """Return the folder of the artifacts that a job uses; None for a job without them."""
    if job.demo_file is None:
        return None
    return _load(job.demo_file, job.run.root).run.folder


def is_made_later(path: str, artifacts: Path | None) -> bool:
    """Return whether the job itself makes the file of a path: ${rewards}, or a file in the folder of artifacts."""
    if "${" in path:
        return True
    return artifacts is not None and Path(path).is_relative_to(artifacts)


def find_demo(values: Mapping[str, Any], *, environ: Mapping[str, str], cwd: Path | None) -> DemoJob | None:
    """Return the demo whose paths or windows the values of a policy job, before validation, lack; else None.

    Nothing is read for values that have all of both, such as those of a run's config.yaml.

    Raises:
        UserError: The file that `artifacts` names is not the config of a demo, or a path needs one that is not named.
    """
    artifacts = values.get("artifacts")
    if artifacts is None:
        _refuse_placeholders(values)
    if not isinstance(artifacts, str | Path):
        return None
    if not _missing_windows(values) and PLACEHOLDER not in str(values):
        return None
    run = values.get("run")
    root = run.get("root") if isinstance(run, Mapping) else None
    path = loading.path_context(environ, cwd).cwd / Path(artifacts).expanduser()
    file = path if path.exists() else Path(artifacts)
    return _load(file, root or RunConfig().root, environ=environ, cwd=cwd)


def resolve_artifacts(values: Mapping[str, Any], demo: DemoJob) -> dict[str, Any]:
    """Return the values of a policy job, before validation, with the demo's folder in paths, and its windows."""
    resolved = _replace(values, str(demo.run.folder))
    for keys, demo_section in _missing_windows(resolved).items():
        section = getattr(demo, demo_section)
        window = getattr(section, keys[-1])
        resolved = with_value_at(resolved, keys, window)
    return resolved


def _refuse_placeholders(values: Mapping[str, Any]) -> None:
    for key, value in loading.flatten(values).items():
        if PLACEHOLDER in str(value):
            raise UserError(
                f"{key}={value}: {PLACEHOLDER} is the folder of the demo that artifacts names; set artifacts"
            )


def _load(file: Path, root: Any, **options: Any) -> DemoJob:
    """Return the demo of a file, with another root; see `loading.load`."""
    quoted = json.dumps(str(root))  # a path may hold what YAML reads otherwise
    return loading.load(DemoJob, file, [f"run.root={quoted}"], **options)


def _missing_windows(values: Mapping[str, Any]) -> dict[Keys, str]:
    """Return the keys of windows that are not set, and the section of the demo that has them."""
    sections: dict[Keys, str] = {("rollout",): "rollout"}
    for keys in _feedback_sections(values):
        sections[*keys, "engine"] = "reward_engine"

    missing: dict[Keys, str] = {}
    for keys, demo_section in sections.items():
        section = _find_section(values, keys)
        if section is None:
            continue
        for name in WINDOWS[demo_section]:
            if name not in section:
                missing[*keys, name] = demo_section
    return missing


def _feedback_sections(values: Mapping[str, Any]) -> list[Keys]:
    """Return the keys of the sections of feedback sources."""
    if not isinstance(values.get("feedback"), Mapping):
        return []
    sources = _find_section(values, ("feedback", "sources"))
    if not sources:
        return [("feedback",)]
    return [("feedback", "sources", name) for name in sources]


def _find_section(values: Mapping[str, Any], keys: Keys) -> Mapping[str, Any] | None:
    """Return the values of a section, {} for one that is not given; None if a value is there that is no section."""
    section: Any = values
    for key in keys:
        section = section.get(key)
        if section is None:
            return {}
        if not isinstance(section, Mapping):
            return None
    return section


def _replace(value: Any, folder: str) -> Any:
    """Return a value with the folder in place of each placeholder in it."""
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, folder)
    if isinstance(value, list | tuple):
        return [_replace(inner, folder) for inner in value]
    if isinstance(value, Mapping):
        return {key: _replace(inner, folder) for key, inner in value.items()}
    return value
