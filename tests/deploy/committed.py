"""The manifests under docker/kuberay, and what each was made from: the command in its first line."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from t2g.config import PolicyJob, loading
from t2g.deploy import render_manifests

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "kuberay"
FILES = sorted(FOLDER.glob("ray*.yaml"))
MADE_BY = "# Made by: python -m jobs.deploy render "


@dataclass(frozen=True)
class RenderCommand:
    """The command's parts."""

    config_path: str
    target: Any
    cpu: bool
    overrides: list[str]

    @property
    def config(self) -> PolicyJob:
        return loading.load(PolicyJob, ROOT / self.config_path, self.overrides, environ={}, cwd=ROOT)

    def render(self) -> str:
        return render_manifests(
            self.config, config_path=self.config_path, target=self.target, cpu=self.cpu, overrides=self.overrides
        )


def read_command(file: Path) -> RenderCommand:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(MADE_BY)
    words = shlex.split(first.removeprefix(MADE_BY))
    cpu = "--cpu" in words
    if cpu:
        words.remove("--cpu")
    assert words[0] == "--config"
    assert words[2] == "--target"
    return RenderCommand(words[1], words[3], cpu, words[4:])


def documents(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The policy for the network, and the RayJob or RayCluster."""
    network, _, main = yaml.safe_load_all(text)
    return network, main


def cluster_spec(main: dict[str, Any]) -> dict[str, Any]:
    return main["spec"]["rayClusterSpec"] if main["kind"] == "RayJob" else main["spec"]
