"""jobs.annotate with fakes in the place of engines: killed in the middle, begun again, refused, tried out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeFeedback, FakeRollouts

from jobs.annotate import DONE_FILE, HELDOUT_FILE, RECORDS_FILE, TRAIN_FILE, annotate_data
from t2g.annotate import is_heldout
from t2g.config import AnnotateJob
from t2g.data.chat import load_tokenizer
from t2g.errors import RunStopped, UserError
from t2g.tasks.tiny_assets import build_tokenizer
from t2g.types import Prompt, SpanFeedback

NUM_PROMPTS = 20


class FakeFleets:
    """One policy and one critic, which may do `before_judging` each time."""

    def __init__(self, config: AnnotateJob, before_judging: Callable[[Prompt], None] = lambda prompt: None) -> None:
        self.policy = FakeRollouts(load_tokenizer(config.model.policy))
        self.critic = FakeFeedback()
        self.before_judging = before_judging
        self.num_judged = 0

    def rollouts(self, *_: Any) -> FakeRollouts:
        return self.policy

    def feedback(self, *_: Any) -> "FakeFleets":
        return self

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.before_judging(prompt)
        self.num_judged += 1
        return await self.critic.judge(prompt, response_text)


@pytest.fixture
def config(tmp_path: Path) -> AnnotateJob:
    build_tokenizer(tmp_path / "model", ["abc"], vocab_size=261)
    rows = [{"id": f"p{i}", "prompt": f"write {i}"} for i in range(NUM_PROMPTS)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return AnnotateJob.model_validate(
        {
            "run": {"root": tmp_path, "name": "annotated"},
            "model": {"policy": str(tmp_path / "model")},
            "data": {"path": str(tmp_path / "data.jsonl")},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8, "max_model_len": 128},
            "feedback": {"source": "my.critics:critic", "max_failed_share": 0.25},
            "heldout_share": 0.3,
        }
    )


def with_run(config: AnnotateJob, **changes: Any) -> AnnotateJob:
    return config.model_copy(update={"run": config.run.model_copy(update=changes)})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompt_ids(path: Path) -> list[str]:
    return [row["prompt_id"] for row in read(path)]


def killer(after: int) -> Callable[[Prompt], None]:
    """The process ends while it asks for judgement number `after` + 1."""
    count = 0

    def before_judging(prompt: Prompt) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt

    return before_judging


def test_a_killed_annotation_pays_for_no_record_twice(config: AnnotateJob) -> None:
    folder = config.run.folder
    with pytest.raises(KeyboardInterrupt):
        annotate_data(config, FakeFleets(config, killer(after=27)))
    assert len(read(folder / RECORDS_FILE)) == 27
    assert not (folder / TRAIN_FILE).exists()
    with (folder / RECORDS_FILE).open("a") as file:
        file.write('{"prompt_id": "p19", "promp')  # the record that was being written

    fleets = FakeFleets(config)
    metrics = annotate_data(config, fleets)
    assert fleets.num_judged == 2 * NUM_PROMPTS - 27
    ids = [f"p{i}" for i in range(NUM_PROMPTS) for _ in range(2)]
    assert prompt_ids(folder / TRAIN_FILE) == [i for i in ids if not is_heldout(i, 0.3)]
    assert prompt_ids(folder / HELDOUT_FILE) == [i for i in ids if is_heldout(i, 0.3)]
    assert metrics["train_records"] + metrics["heldout_records"] == 2 * NUM_PROMPTS
    assert metrics["failed_share"] == 0

    untouched = FakeFleets(config)
    assert annotate_data(config, untouched) == metrics
    assert untouched.num_judged == 0


def test_half_a_file_is_not_taken_for_a_whole_one(config: AnnotateJob) -> None:
    folder = config.run.folder
    metrics = annotate_data(config, FakeFleets(config))
    whole = (folder / TRAIN_FILE).read_text()
    (folder / TRAIN_FILE).write_text(whole[: len(whole) // 2])
    (folder / DONE_FILE).unlink()
    assert annotate_data(config, FakeFleets(config)) == metrics
    assert (folder / TRAIN_FILE).read_text() == whole


def test_failed_feedback_is_asked_for_again(config: AnnotateJob) -> None:
    fleets = FakeFleets(config)
    fleets.critic.failing = lambda prompt: int(prompt.prompt_id[1:]) < 8  # 40 %
    with pytest.raises(RunStopped, match=r"40% of 40 responses got no usable .* allows 25%"):
        annotate_data(config, fleets)
    again = FakeFleets(config)
    again.critic.failing = lambda prompt: prompt.prompt_id == "p0"
    metrics = annotate_data(config, again)
    assert again.num_judged == 16
    assert metrics["failed_share"] == pytest.approx(2 / 40)
    assert "p0" not in prompt_ids(config.run.folder / TRAIN_FILE) + prompt_ids(config.run.folder / HELDOUT_FILE)


def test_a_split_that_leaves_a_file_empty_is_refused_before_anything_is_judged(config: AnnotateJob) -> None:
    fleets = FakeFleets(config)
    with pytest.raises(UserError, match=r"no record for heldout\.jsonl: 20 prompts .* heldout_share=1e-06"):
        annotate_data(config.model_copy(update={"heldout_share": 1e-6}), fleets)
    assert fleets.num_judged == 0


@pytest.mark.parametrize("after", [5, 40])
def test_another_config_is_refused_by_the_names_of_its_keys(config: AnnotateJob, after: int) -> None:
    if after < 40:
        with pytest.raises(KeyboardInterrupt):
            annotate_data(config, FakeFleets(config, killer(after)))
    else:
        annotate_data(config, FakeFleets(config))
    hotter = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 0.5})})
    with pytest.raises(UserError, match=r"rollout\.temperature \(1\.0 -> 0\.5\)"):
        annotate_data(hotter, FakeFleets(config))
    with pytest.raises(UserError, match=r"run\.resume=never, and .*records\.jsonl exists"):
        annotate_data(with_run(config, resume="never"), FakeFleets(config))


def test_a_smoke_run_does_eight_prompts_and_touches_nothing_else(
    config: AnnotateJob, capsys: pytest.CaptureFixture[str]
) -> None:
    smoke = with_run(config, smoke=True)
    for _ in range(2):  # the second starts from nothing
        fleets = FakeFleets(config)
        metrics = annotate_data(smoke, fleets)
        assert fleets.num_judged == 16
        assert metrics["samples_per_s"] > 0
        assert "samples/s; 20 prompts will take about 0 s" in capsys.readouterr().out
    assert {path.name for path in config.run.folder.iterdir()} == {"smoke"}
    assert len(read(config.run.folder / "smoke" / RECORDS_FILE)) == 16
