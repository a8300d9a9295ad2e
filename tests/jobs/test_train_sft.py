"""What a supervised job does with the folder that it finds."""

from pathlib import Path
from typing import Any

import pytest

from jobs.common.run_folder import begin_folder, check_folder
from t2g.config import SFTJob, loading
from t2g.errors import UserError
from t2g.runs.identity import IDENTITY_FILE
from t2g.runs.log import COMMANDS_FILE


def job(root: Path, *, run: dict[str, Any] | None = None, **sft: Any) -> SFTJob:
    return SFTJob.model_validate(
        {"run": {"root": root, "name": "sft", **(run or {})}, "model": {"policy": "m"}, "data": {"path": "d.jsonl"},
         "sft": sft}
    )  # fmt: skip


def test_a_config_that_left_nothing_is_replaced(tmp_path: Path) -> None:
    begin_folder(job(tmp_path))
    folder = begin_folder(job(tmp_path, batch_size=8))
    assert loading.load(SFTJob, folder / loading.FILE_NAME).sft.batch_size == 8


@pytest.mark.parametrize("leftover", ["model", "model.part"])
def test_a_config_that_left_a_model_binds_the_next_start(tmp_path: Path, leftover: str) -> None:
    folder = begin_folder(job(tmp_path))
    (folder / leftover).mkdir()
    begin_folder(job(tmp_path, timeout_s=5, checkpoint_every=7))
    with pytest.raises(UserError, match=r"sft\.batch_size \(64 -> 8\)"):
        begin_folder(job(tmp_path, batch_size=8))
    assert loading.load(SFTJob, folder / loading.FILE_NAME).sft.batch_size == 64
    with pytest.raises(UserError, match=rf"run\.resume=never, and .*{leftover} exists"):
        check_folder(job(tmp_path, run={"resume": "never"}))


def test_a_smoke_run_starts_from_nothing_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = begin_folder(job(tmp_path))
    (folder / "model").mkdir()
    for batch_size in (8, 16):
        smoke = begin_folder(job(tmp_path, run={"smoke": True}, batch_size=batch_size))
        assert smoke == folder / "smoke"
        assert {path.name for path in smoke.iterdir()} == {loading.FILE_NAME, IDENTITY_FILE, COMMANDS_FILE}
        (smoke / "model").mkdir()
    assert loading.load(SFTJob, folder / loading.FILE_NAME).sft.batch_size == 64


def test_a_run_folder_of_the_layout_before_is_refused(tmp_path: Path) -> None:
    config = job(tmp_path)
    loading.write(config, config.run.folder)
    (config.run.folder / "model").mkdir()
    (config.run.folder / "summary.json").write_text('{"steps": 3}')
    for check in (check_folder, begin_folder, lambda config: check_folder(config, "summary.json")):
        with pytest.raises(UserError, match=r"by another version of this program.*take another run\.name$"):
            check(config)
