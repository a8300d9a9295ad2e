"""What a RayJob names and the project's image lacks: config files outside configs/, modules of the user's own."""

from pathlib import Path

import pytest
from tests.configs import ROOT

from jobs import deploy
from t2g.config import PolicyJob, loading
from t2g.deploy.image_contents import image_warnings

CONFIG = ROOT / "configs" / "slf5k" / "policy.yaml"


def keys_of_warnings(file: str, *overrides: str) -> list[str]:
    config = loading.load(PolicyJob, CONFIG, overrides)
    return [warning.partition(" is ")[0] for warning in image_warnings(config, Path(file))]


@pytest.mark.parametrize("file", ["configs/slf5k/policy.yaml", "configs/own.yaml", "/mnt/t2g/own.yaml"])
def test_the_image_has_its_configs_and_the_volume(file: str) -> None:
    assert keys_of_warnings(file) == []


@pytest.mark.parametrize("file", ["own.yaml", "own/configs/a.yaml", "../configs/a.yaml", "tests/configs/a.yaml"])
def test_other_config_files_are_named(file: str) -> None:
    assert keys_of_warnings(file) == ["--config"]


def test_modules_of_the_users_own_are_named_with_their_key() -> None:
    overrides = [
        "feedback.source=judges.facts:judge",
        "objective.outcome_rewards=[{source: task}, {source: rewards:exact}, {source: metric:length}]",
    ]
    assert keys_of_warnings("configs/own.yaml", *overrides) == ["feedback.source", "objective.outcome_rewards.source"]


def test_the_projects_own_modules_are_in_the_image() -> None:
    overrides = [
        "feedback.source=t2g.tasks.findings_feedback:feedback_function",
        "run.accept=[feedback:a3f1c2d4e5a69788]",
        "feedback.llm.model=llama3:latest",
    ]
    assert keys_of_warnings("configs/a.yaml", *overrides) == []


def test_render_warns_for_a_rayjob_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A RayCluster gets its code and configs from `submit`."""
    (tmp_path / "own.yaml").write_text(CONFIG.read_text())
    monkeypatch.chdir(tmp_path)
    paths = ["data.path=/mnt/t2g/slf5k.json", "feedback.reward_model=/mnt/t2g/model", "run.root=/mnt/t2g/runs"]
    for target, is_warned in (("rayjob", True), ("raycluster", False)):
        code = deploy.main(["render", "--target", target, "--config", "own.yaml", *paths])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        assert ("warning: --config is own.yaml" in captured.err) is is_warned
        assert "warning" not in captured.out, "it is YAML"
