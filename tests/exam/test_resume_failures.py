"""Exam of silent failures: a run that goes on after a restart with other data, another judge, or another state."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import letter_tokenizer
from trainer_bench import NUM_STEPS, Bench, chosen, job

from jobs.common.run_folder import begin_folder
from jobs.train_policy.policy_job import check_start
from t2g.config import PolicyJob
from t2g.errors import UserError

FUNCTION = "def judge(prompt, response):\n    return 'fine', [], []\n"
STEPS_AN_EPOCH = 2  # of the bench, which writes a checkpoint every two steps


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def trained_prompts(bench: Bench) -> list[set[str]]:
    """Return the prompts of each step that the learner saw."""
    prompts = []
    for rollouts in bench.learner.seen:
        ids = {rollout.prompt_id for rollout in rollouts}
        prompts.append(ids)
    return prompts


@pytest.mark.parametrize("last_step", [STEPS_AN_EPOCH, STEPS_AN_EPOCH + 1, 2 * STEPS_AN_EPOCH])
def test_a_resume_at_the_end_of_an_epoch_skips_and_repeats_no_step(
    last_step: int, tokenizer: Any, tmp_path: Path
) -> None:
    first = Bench(tmp_path, tokenizer, job(), stop=lambda: first.trainer.state.step == last_step)
    first.run()
    second = Bench(tmp_path, tokenizer, job())
    assert second.run().step == NUM_STEPS
    assert [step["step"] for step in second.metrics()] == [*range(NUM_STEPS + 1)]
    expected = [set(chosen(step)) for step in range(1, NUM_STEPS + 1)]
    assert trained_prompts(first) + trained_prompts(second) == expected
    for epoch in range(NUM_STEPS // STEPS_AN_EPOCH):
        of_epoch = expected[epoch * STEPS_AN_EPOCH : (epoch + 1) * STEPS_AN_EPOCH]
        assert of_epoch[0].isdisjoint(of_epoch[1]), "an epoch holds no prompt twice"


def test_the_optimizer_goes_on_where_it_was(tokenizer: Any, tmp_path: Path) -> None:
    whole = Bench(tmp_path / "whole", tokenizer, job())
    whole.run()
    first = Bench(tmp_path / "cut", tokenizer, job(), stop=lambda: first.trainer.state.step == 2)
    first.run()
    shutil.copytree(tmp_path / "cut", tmp_path / "fresh")
    second = Bench(tmp_path / "cut", tokenizer, job())
    second.run()
    np.testing.assert_array_equal(second.learner.logits.detach(), whole.learner.logits.detach())

    without = Bench(tmp_path / "fresh", tokenizer, job())
    without.learner.optimizer.load_state_dict = lambda state: None
    without.run()
    difference = (without.learner.logits - whole.learner.logits).detach().abs().max()
    assert difference > 1e-3, "a fresh optimizer makes other numbers"


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_checkpoint_whose_state_is_not_what_was_written_is_refused(
    damage: str, tokenizer: Any, tmp_path: Path
) -> None:
    first = Bench(tmp_path, tokenizer, job(), stop=lambda: first.trainer.state.step == 2)
    first.run()
    (state,) = (tmp_path / "checkpoints").glob("step-*/learner/fake.pt")
    content = state.read_bytes()
    state.unlink()
    if damage == "changed":
        state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    second = Bench(tmp_path, tokenizer, job())
    with pytest.raises(UserError, match=r"cannot read step-00000002 \(.*fake\.pt.*nothing was deleted"):
        second.run()
    assert second.learner.batches == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "exam_judge.py").write_text(FUNCTION)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "exam_judge", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("exam_judge.py", FUNCTION.replace("fine", "poor"), "feedback.source"),
        ("data.jsonl", '{"prompt": "Why not?"}\n', "data.path"),
    ],
)
def test_a_changed_judge_or_data_file_is_refused_by_its_key(file: str, content: str, key: str, folder: Path) -> None:
    values = {"model": {"policy": "unused"}, "data": {"path": "data.jsonl"}, "num_steps": 3}
    values |= {"feedback": {"source": "exam_judge:judge"}, "run": {"root": str(folder), "name": "own"}}
    job = PolicyJob.model_validate(values)
    begin_folder(job)
    check_start(job)
    path = folder / file
    path.write_text(content)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))  # a clock may be coarse
    with pytest.raises(UserError, match=rf"made with other inputs: the content of {key} \(hash .*run\.accept=\["):
        check_start(job)
