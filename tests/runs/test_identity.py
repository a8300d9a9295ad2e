"""What a result was made of is named where it differs, whoever asks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2g.config import PolicyJob
from t2g.errors import UserError
from t2g.runs.identity import IDENTITY_FILE, Identity, changes, check, data_hash, finished, keep

PARTS = {"weights": "w1", "data": "d1", "feedback": "critic-1"}


def job(**changed: Any) -> PolicyJob:
    base = {"model": {"policy": "m"}, "data": {"path": "d.jsonl"}, "num_steps": 3, "feedback": {"source": "pkg:critic"}}
    return PolicyJob.model_validate(base | changed)


def test_the_same_run_is_one_whose_fixed_parts_are_the_same(tmp_path: Path) -> None:
    keep(tmp_path / "run", Identity.of(job(), **PARTS))
    free = {"num_steps": 500, "rollout": {"workers": 3}, "cluster": {"address": "auto"}}
    check(tmp_path / "run", Identity.of(job(**free), **PARTS))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Identity.of(job(rollout={"temperature": 0.9}), **PARTS), "rollout.temperature (1.0 -> 0.9)"),
        (Identity.of(job(run={"seed": 2}), **PARTS), "run.seed (1 -> 2)"),
        (Identity.of(job(), **PARTS | {"weights": "w2"}), 'the weights of model.policy ("w1" -> "w2")'),
        (Identity.of(job(), **PARTS | {"data": "d2"}), 'what data.path holds ("d1" -> "d2")'),
        (Identity.of(job(), **PARTS | {"feedback": ""}), 'the version of the feedback ("critic-1" -> "")'),
        (Identity.of(job(), **PARTS, method="dpo"), 'method (null -> "dpo")'),
        (Identity.of(job(), **PARTS).model_copy(update={"format": 99}), "by another version of this program (format 1"),
    ],
)
def test_another_is_refused_in_a_sentence_that_names_the_part_and_what_to_do(
    tmp_path: Path, now: Identity, words: str
) -> None:
    keep(tmp_path, Identity.of(job(), **PARTS))
    assert len(changes(tmp_path, now)) == 1
    with pytest.raises(UserError, match=r"go back to that, or take another run\.name") as error:
        check(tmp_path, now)
    assert f"{tmp_path} was made otherwise: {words}" in str(error.value)


@pytest.mark.parametrize("content", [None, "", "[]", '{"fingerprint": "9a"}'])
def test_a_folder_of_the_layout_before_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    if content is not None:
        (tmp_path / IDENTITY_FILE).write_text(content)
    with pytest.raises(UserError, match=r"by another version of this program.*go back to that, or take another run"):
        finished(tmp_path, Identity.of(job()), "summary.json")


def test_a_result_is_given_back_to_who_asks_for_the_same(tmp_path: Path) -> None:
    folder, made_of = tmp_path / "run", Identity.of(job(), **PARTS)
    keep(folder, made_of)
    assert finished(folder, made_of, "summary.json") is None
    (folder / "summary.json").write_text(json.dumps({"steps": 3}))
    assert finished(folder, made_of, "summary.json") == {"steps": 3}
    with pytest.raises(UserError, match=r"what data\.path holds"):
        finished(folder, Identity.of(job(), **PARTS | {"data": "d2"}), "summary.json")


def test_the_hash_of_data_changes_with_every_value_and_every_border() -> None:
    rows = [("a", np.arange(3)), ("b", np.arange(2))]
    others = [
        rows[::-1],
        rows[:1],
        [("a", np.arange(3)), ("b", np.arange(2) + 1)],
        [("a", np.arange(3)[:2]), ("b", np.arange(2))],
        [("a", np.arange(3)), ("b", np.arange(2, dtype=np.int32))],
        [("ab", np.arange(3)), ("", np.arange(2))],
    ]
    assert len({data_hash(some) for some in [rows, *others]}) == 7
    assert data_hash(rows) == data_hash(list(rows))
