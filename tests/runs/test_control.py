import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import PolicyJob, WorkersConfig, loading
from t2g.errors import UserError
from t2g.runs.control import (
    CONTROL_FILE,
    STATUS_FILE,
    Control,
    FleetStatus,
    Status,
    TargetSizes,
    WorkerStatus,
    get_scalable_fleets,
    read_status,
    read_target_sizes,
    write_status,
    write_target_sizes,
)


def job(folder: Path, *, autoscale: bool = False, source: str = "reward_model") -> PolicyJob:
    return PolicyJob.model_validate(
        {
            "run": {"root": folder.parent, "name": folder.name},
            "model": {"policy": "some/policy"},
            "data": {"path": "prompts.jsonl"},
            "rollout": {"workers": {"min": 1, "max": 4}, "autoscale": autoscale},
            "feedback": {"source": source, "reward_model": "some/model", "engine": {"workers": {"min": 2, "max": 3}}},
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    loading.write(job(folder), folder)
    return folder


def test_what_is_written_is_read_and_other_fleets_keep_their_wish(folder: Path) -> None:
    assert read_target_sizes(folder) is None
    assert write_target_sizes(folder, TargetSizes(rollouts=3)) == TargetSizes(rollouts=3)
    assert write_target_sizes(folder, TargetSizes(rewards=2)) == TargetSizes(rollouts=3, rewards=2)
    assert (
        write_target_sizes(folder, TargetSizes(rollouts=1))
        == read_target_sizes(folder)
        == TargetSizes(rollouts=1, rewards=2)
    )
    assert json.loads((folder / CONTROL_FILE).read_text()) == {"rollouts": 1, "rewards": 2}


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({}, "no target is given: rollouts or rewards needs a number"),
        ({"rollouts": 0}, "rollouts: got 0, and rollout.workers of this run allows 1 to 4"),
        ({"rollouts": 5}, "rollouts: got 5, and rollout.workers of this run allows 1 to 4"),
        ({"rewards": 1}, "rewards: got 1, and feedback.engine.workers of this run allows 2 to 3"),
    ],
)
def test_a_number_out_of_bounds_is_refused_and_nothing_is_written(
    folder: Path, sizes: dict[str, int], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        write_target_sizes(folder, TargetSizes(**sizes))
    assert str(refused.value) == sentence
    assert not (folder / CONTROL_FILE).exists()


def test_fleets_without_manual_scaling_are_refused(folder: Path) -> None:
    loading.write(job(folder, autoscale=True), folder)
    with pytest.raises(UserError, match="chooses their number itself"):
        write_target_sizes(folder, TargetSizes(rollouts=2))
    loading.write(job(folder, source="program"), folder)
    with pytest.raises(UserError, match=r"feedback\.source=program has no engines"):
        write_target_sizes(folder, TargetSizes(rewards=2))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        write_target_sizes(tmp_path / "missing", TargetSizes(rollouts=2))
    assert not (tmp_path / "missing").exists()


def test_bounds_are_those_of_the_fleets_that_are_scaled_by_hand(tmp_path: Path) -> None:
    assert set(get_scalable_fleets(job(tmp_path / "a"))) == {"rollouts", "rewards"}
    assert set(get_scalable_fleets(job(tmp_path / "a", autoscale=True))) == {"rewards"}
    assert set(get_scalable_fleets(job(tmp_path / "a", source="program"))) == {"rollouts"}


@pytest.mark.parametrize(
    "content",
    [b"{", b"[3]", b'{"rollouts": "3"}', b'{"rollouts": true}', b'{"wish": 3}', b"\xff", b"9" * 9],
)
def test_a_file_that_is_none_of_ours_is_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    control = Control(folder, get_scalable_fleets(job(folder)))
    (folder / CONTROL_FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert [control.read_changes() for _ in range(3)] == [{}, {}, {}]
    assert len(caplog.records) == 1 and CONTROL_FILE in caplog.text
    for _ in range(2):
        write_target_sizes(folder, TargetSizes(rollouts=2))
        assert control.read_changes() == {"rollouts": 2}, "also if the same size is written again"


@pytest.mark.parametrize("what", ["pipe", "folder", "link", "loop", "endless"])
def test_a_path_without_a_file_is_one_warning_and_causes_no_wait(
    folder: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    control = Control(folder, get_scalable_fleets(job(folder)))
    path = folder / CONTROL_FILE
    (folder / "elsewhere").write_text('{"rollouts": 3}')
    targets = {"link": "elsewhere", "loop": CONTROL_FILE, "endless": "/dev/zero"}
    if what in targets:
        path.symlink_to(targets[what])
    else:
        os.mkfifo(path) if what == "pipe" else path.mkdir()
    assert [control.read_changes() for _ in range(3)] == [{}, {}, {}]
    assert len(caplog.records) == 1 and CONTROL_FILE in caplog.text


def test_numbers_out_of_bounds_are_brought_within_them_with_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    control = Control(folder, get_scalable_fleets(job(folder)))
    (folder / CONTROL_FILE).write_text('{"rollouts": 99, "rewards": -1}')
    with caplog.at_level(logging.WARNING):
        assert [control.read_changes() for _ in range(3)] == [{"rollouts": 4, "rewards": 2}, {}, {}]
    assert [r.getMessage().partition("asks for ")[2] for r in caplog.records] == [
        "{'rollouts': 99, 'rewards': -1}, and this run allows rollout.workers from 1 to 4 and "
        "feedback.engine.workers from 2 to 3: applying {'rollouts': 4, 'rewards': 2}",
    ]


def test_a_wish_for_a_fleet_that_is_not_scaled_is_passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    control = Control(folder, {"rewards": WorkersConfig(max=3)})
    (folder / CONTROL_FILE).write_text('{"rollouts": 2, "rewards": 3}')
    assert control.read_changes() == {"rewards": 3}
    assert "rollouts" in caplog.text


def test_a_file_that_goes_away_and_comes_back_is_no_news(folder: Path) -> None:
    control = Control(folder, get_scalable_fleets(job(folder)))
    assert control.read_changes() == {}
    write_target_sizes(folder, TargetSizes(rollouts=2))
    assert control.read_changes() == {"rollouts": 2}
    (folder / CONTROL_FILE).rename(folder / "away")
    assert control.read_changes() == {}
    (folder / "away").rename(folder / CONTROL_FILE)
    assert control.read_changes() == {}


def test_a_wish_that_could_not_be_read_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control(folder, get_scalable_fleets(job(folder)))
    write_target_sizes(folder, TargetSizes(rollouts=2))
    with monkeypatch.context() as broken:
        broken.setattr("t2g.runs.control._read_bytes", lambda path: b"")
        assert control.read_changes() == {}
    assert control.read_changes() == {"rollouts": 2}


@given(st.binary(max_size=200))
def test_no_content_can_hurt_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / CONTROL_FILE).write_bytes(content)
    changes = Control(folder, {"rollouts": WorkersConfig(max=4)}).read_changes()
    assert changes in ({}, *({"rollouts": number} for number in (1, 2, 3, 4)))


STATUS = Status(
    step=12,
    num_steps=100,
    samples=768,
    updated=datetime(2026, 11, 21, 12, tzinfo=UTC),
    fleets=(
        FleetStatus(
            role="rollout",
            target_size=2,
            workers=(WorkerStatus(name="rollout worker 0", state="serving", version=12, restarts=1, load=8),),
        ),
    ),
    idle={"learner": 0.25},
)


def test_a_status_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS
    written = json.loads((tmp_path / STATUS_FILE).read_text())
    assert written["updated"] == "2026-11-21T12:00:00Z"
    assert written["fleets"][0]["workers"][0] == {
        "name": "rollout worker 0", "state": "serving", "reason": "", "version": 12, "restarts": 1,
        "restarts_left": None, "load": 8,
    }  # fmt: skip


@pytest.mark.parametrize("content", ["", "{", '{"step": 1}', '{"step": "x"}'])
def test_a_status_that_is_none_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / STATUS_FILE).write_text(content)
    with pytest.raises(UserError, match=STATUS_FILE):
        read_status(tmp_path)
