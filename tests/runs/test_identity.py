"""What a result was made of is named where it differs, in every job and after every move."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from t2g.config import AnnotateJob, PolicyJob, with_overrides
from t2g.errors import UserError
from t2g.runs.identity import (
    IDENTITY_FILE,
    ContentChange,
    Identity,
    check_identity,
    load_identity,
    load_result,
    save_identity,
)

FUNCTION = "def judge(prompt, response):\n    return 'fine', [], []\n"


def job(**changed: Any) -> PolicyJob:
    base = {"model": {"policy": "m"}, "data": {"path": "d.jsonl"}, "num_steps": 3, "feedback": {"source": "pkg:judge"}}
    return PolicyJob.model_validate(base | changed)


class Made:
    """A run folder beside everything that its config names on this machine: model, data, functions, a human file."""

    def __init__(self, root: Path, module: str) -> None:
        self.root = root
        self.module = module
        (root / "model").mkdir(parents=True)
        (root / "model" / "model.safetensors").write_bytes(b"weights")
        (root / "model" / "tokenizer.json").write_text("{}")
        (root / "train.jsonl").write_text('{"prompt": "a", "tests": "assert 1"}\n')
        (root / "heldout.jsonl").write_text('{"prompt": "b"}\n')
        (root / "human.jsonl").write_text('{"prompt": "a", "response": "b", "critique": "c", "good": []}\n')
        (root / f"{module}.py").write_text(FUNCTION)
        (root / f"{module}_reward.py").write_text("def pay(completions):\n    return [1.0 for _ in completions]\n")

    def job(self, *accept: str, **changed: Any) -> PolicyJob:
        feedback = {"source": f"{self.module}:judge", "human_file": str(self.root / "human.jsonl")}
        objective = {"outcome_rewards": [{"source": f"{self.module}_reward:pay"}]}
        values = {
            "run": {"root": self.root / "runs", "name": "own", "accept": accept},
            "model": {"policy": str(self.root / "model")},
            "data": {"path": str(self.root / "train.jsonl")},
            "eval_data": {"path": str(self.root / "heldout.jsonl")},
        }
        return job(**values | {"feedback": feedback, "objective": objective} | changed)

    def begin(self, *accept: str, **changed: Any) -> Identity:
        """As a job's start does."""
        identity = Identity.from_config(self.job(*accept, **changed))
        folder = self.root / "runs" / "own"
        identity = check_identity(folder, identity) if (folder / IDENTITY_FILE).exists() else identity
        save_identity(folder, identity)
        return identity

    def refusal(self, *accept: str, **changed: Any) -> str:
        with pytest.raises(UserError) as error:
            self.begin(*accept, **changed)
        return str(error.value)

    def write(self, name: str, content: str) -> None:
        path = self.root / name
        path.write_text(content)
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))  # a clock may be coarse


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made(tmp_path / "here", f"function_of_{tmp_path.name}")
    monkeypatch.syspath_prepend(str(made.root))
    return made


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("model/model.safetensors", "model.policy"),
        ("model/tokenizer.json", "model.policy"),
        ("train.jsonl", "data.path"),
        ("heldout.jsonl", "eval_data.path"),
        ("human.jsonl", "feedback.human_file"),
        ("{module}.py", "feedback.source"),
        ("{module}_reward.py", "objective.outcome_rewards.{module}_reward:pay"),
    ],
)
def test_a_change_behind_a_name_is_refused_until_its_hash_is_accepted(made: Made, file: str, key: str) -> None:
    part = key.partition(".")[0]
    file = file.format(module=made.module)
    key = key.format(module=made.module)
    before = made.begin().contents[key]
    content = (made.root / file).read_text()

    made.write(file, content + " ")
    second = Identity.from_config(made.job()).contents[key]
    assert f"made with other inputs: the content of {key} (hash {before} -> {second})" in made.refusal()
    assert f"run.accept=[{part}:{second}]' goes on" in made.refusal()
    assert second in made.refusal(f"{part}:{before}"), "the hash of the old content accepts nothing"

    change = ContentChange(key=key, before=before, after=second)
    assert made.begin(f"{part}:{second}").accepted == (change,)
    assert json.loads((made.root / "runs/own" / IDENTITY_FILE).read_text())["accepted"] == [change.model_dump()]
    assert made.begin().accepted == (change,), "the next plain start goes on"

    made.write(file, content + "  ")
    third = Identity.from_config(made.job()).contents[key]
    refusal = made.refusal(f"{part}:{second}")  # a line that is left in a YAML file
    assert f"run.accept=[{part}:{third}]" in refusal


def test_a_change_that_comes_again_is_accepted_again_and_not_by_the_line_of_the_first_time(made: Made) -> None:
    made.begin()
    hashes = []
    for content in ("b", "c"):
        made.write("train.jsonl", content)
        hashes.append(Identity.from_config(made.job()).contents["data.path"])
        made.begin(f"data:{hashes[-1]}")
    made.write("train.jsonl", "b")
    lines = [f"data:{found}" for found in hashes]
    assert f"run.accept=[{lines[0]},{lines[0]}]" in made.refusal(*lines)
    assert len(made.begin(*lines, lines[0]).accepted) == 3


def test_what_is_accepted_is_that_change_alone(made: Made) -> None:
    made.begin()
    made.write("train.jsonl", "other")
    made.write("heldout.jsonl", "other")
    found = Identity.from_config(made.job()).contents
    tokens = f"data:{found['data.path']}", f"eval_data:{found['eval_data.path']}"
    assert tokens[0].removeprefix("data:") == tokens[1].removeprefix("eval_data:"), "the same content"
    assert f"run.accept=[{tokens[1]}]" in made.refusal(tokens[0])
    assert "objective.lam" in made.refusal(*tokens, objective={"lam": 0.5}), "no setting is accepted by it"
    assert made.begin(*tokens).contents == found


def test_a_moved_folder_with_the_same_contents_goes_on(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    before = made.begin()
    there = made.root.with_name("there")
    made.root.rename(there)
    made.root = there
    monkeypatch.syspath_prepend(str(there))
    for module in (made.module, f"{made.module}_reward"):
        monkeypatch.delitem(sys.modules, module)  # as in another process
    assert made.begin() == before
    shutil.copy(there / "train.jsonl", there / "renamed.jsonl")
    named = with_overrides(made.job(), {"data.path": str(there / "renamed.jsonl")})
    assert check_identity(there / "runs" / "own", Identity.from_config(named)) == before


def test_several_data_files_are_their_contents_in_order_whatever_their_names(made: Made) -> None:
    def begin(*names: str) -> Identity:
        paths = [str(made.root / name) for name in names]
        identity = Identity.from_config(with_overrides(made.job(), {"data.path": paths}))
        assert "data.path" not in identity.config
        return identity

    assert begin("train.jsonl").contents == made.begin().contents, "a list of one is that one"
    (made.root / "more").mkdir()
    made.write("more/part.jsonl", "more")
    before = begin("train.jsonl", "more").contents["data.path"]
    (made.root / "train.jsonl").rename(made.root / "renamed.jsonl")
    (made.root / "more").rename(made.root / "moved")
    assert begin("renamed.jsonl", "moved").contents["data.path"] == before
    assert begin("moved", "renamed.jsonl").contents["data.path"] != before, "another order of the prompts"
    made.write("moved/part.jsonl", "other")
    assert begin("renamed.jsonl", "moved").contents["data.path"] not in (before, "")
    assert begin("renamed.jsonl", "gone").contents.keys() == begin("renamed.jsonl").contents.keys() - {"data.path"}


def test_a_name_on_a_hub_stays_a_name_and_so_does_a_model_of_a_server() -> None:
    hub = Identity.from_config(job(model={"policy": "owner/name", "revision": "c1"}, data={"path": "owner/set"}))
    assert hub.config["model.policy"] == "owner/name"
    assert hub.config["model.revision"] == "c1"
    assert hub.config["data.path"] == "owner/set" and hub.contents == {}
    llm = {"url": "http://127.0.0.1:1/v1", "model": str(Path.cwd())}
    served = Identity.from_config(job(feedback={"source": "llm", "llm": llm}))
    assert served.config["feedback.llm.model"] == str(Path.cwd())
    assert served.contents == {}


def test_an_annotation_compares_its_data_record_by_record(made: Made) -> None:
    config = {"data": {"path": str(made.root / "train.jsonl")}, "annotate": {"source": f"{made.module}:judge"}}
    before = Identity.from_config(AnnotateJob.model_validate(config))
    made.write("train.jsonl", "other")
    assert Identity.from_config(AnnotateJob.model_validate(config)) == before
    made.write(f"{made.module}.py", FUNCTION + "\n")
    after = Identity.from_config(AnnotateJob.model_validate(config))
    assert before.contents.keys() == after.contents.keys() == {"annotate.source"}
    assert before.contents != after.contents


def test_what_is_not_there_yet_is_compared_once_it_is(made: Made) -> None:
    (made.root / "model").rename(made.root / "later")
    made.begin()
    (made.root / "later").rename(made.root / "model")
    assert "model.policy" in made.begin().contents
    made.write("model/model.safetensors", "other")
    assert "the content of model.policy" in made.refusal()


def test_the_same_run_is_one_whose_fixed_parts_are_the_same(tmp_path: Path) -> None:
    constant = {"policy": {"schedule": "constant"}}
    save_identity(tmp_path / "run", Identity.from_config(job(learner=constant)))
    free = {"num_steps": 500, "rollout": {"workers": 3}, "cluster": {"address": "auto"}, "learner": constant}
    check_identity(tmp_path / "run", Identity.from_config(job(**free)))


@pytest.mark.parametrize(
    ("now", "differences"),
    [
        (job(rollout={"temperature": 0.9}), "rollout.temperature (1.0 -> 0.9)"),
        (job(run={"seed": 2}), "run.seed (1 -> 2)"),
        (job(data={"path": "other"}), 'data.path ("d.jsonl" -> "other")'),
    ],
)
def test_another_is_refused_in_a_sentence_that_names_the_part_and_what_to_do(
    tmp_path: Path, now: PolicyJob, differences: str
) -> None:
    save_identity(tmp_path, Identity.from_config(job()))
    with pytest.raises(UserError) as error:
        check_identity(tmp_path, Identity.from_config(now))
    assert (
        str(error.value)
        == f"{tmp_path} was made with other inputs: {differences}; restore that, or take another run.name"
    )
    with pytest.raises(UserError, match=r'inputs: method \(null -> "dpo"\)'):
        check_identity(tmp_path, Identity.from_config(job(), method="dpo"))


GAE = {"advantages": "gae"}


@pytest.mark.parametrize(
    ("learner", "objective", "spans"),
    [
        ({}, {}, 3),  # linear is the default
        ({"policy": {"schedule": "cosine"}}, {}, 3),
        ({"policy": {"schedule": "constant"}}, {}, None),
        ({"policy": {"schedule": "constant"}}, GAE, 3),  # the critic's is linear
        ({"policy": {"schedule": "constant"}, "critic": {"schedule": "constant"}}, GAE, None),
        ({"policy": {"schedule": "constant", "warmup_ratio": 0.1}}, {}, 3),
        ({"schedule_steps": 7}, {}, 7),
    ],
)
def test_another_number_of_steps_keeps_the_schedule_or_is_refused(
    tmp_path: Path, learner: dict[str, Any], objective: dict[str, Any], spans: int | None
) -> None:
    given = {"learner": learner, "objective": objective}
    save_identity(tmp_path, first := Identity.from_config(job(**given)))
    assert first.config["learner.schedule_steps"] == spans
    longer = Identity.from_config(job(**given, num_steps=9))
    if spans == 3:
        with pytest.raises(UserError) as error:
            check_identity(tmp_path, longer)
        assert "learner.schedule_steps (3 -> 9)" in str(error.value)
        assert "learner.schedule_steps=3 keeps the learning-rate schedule whatever num_steps is" in str(error.value)
        given["learner"] = learner | {"schedule_steps": 3}
        longer = Identity.from_config(job(**given, num_steps=9))
    check_identity(tmp_path, longer)


@pytest.mark.parametrize("content", [None, "", "[]", '{"fingerprint": "9a"}', '{"format": 2, "config": {}}'])
def test_a_folder_of_another_layout_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    if content is not None:
        (tmp_path / IDENTITY_FILE).write_text(content)
    with pytest.raises(UserError, match=r"by another version of this program.*take another run\.name"):
        load_result(tmp_path, Identity.from_config(job()), "summary.json")


def test_a_result_is_returned_for_the_same_identity(made: Made) -> None:
    identity = made.begin()
    folder = made.root / "runs" / "own"
    assert load_result(folder, identity, "summary.json") is None
    (folder / "summary.json").write_text(json.dumps({"steps": 3}))
    assert load_result(folder, Identity.from_config(made.job()), "summary.json") == {"steps": 3}
    made.write("train.jsonl", "other")
    with pytest.raises(UserError, match=r"the content of data\.path"):
        load_result(folder, Identity.from_config(made.job()), "summary.json")
    after = Identity.from_config(made.job()).contents["data.path"]
    assert load_result(folder, Identity.from_config(made.job(f"data:{after}")), "summary.json") == {"steps": 3}
    assert load_identity(folder).contents["data.path"] == after


def test_missing_content_is_refused_by_name_and_cannot_be_accepted(made: Made) -> None:
    (made.root / "human.jsonl").rename(made.root / "later.jsonl")
    assert "feedback.human_file" not in made.begin().contents
    (made.root / "later.jsonl").rename(made.root / "human.jsonl")
    made.begin()  # content that appears after the first start is no change
    before = made.begin().contents["data.path"]
    (made.root / "train.jsonl").unlink()
    refusal = made.refusal()
    assert f"the content of data.path (hash {before} -> missing)" in refusal
    assert "run.accept" not in refusal


def test_a_key_that_an_earlier_version_did_not_have_counts_as_its_default(made: Made) -> None:
    identity = made.begin()
    path = made.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    for key in ("feedback.style.spans", "feedback.align", "objective.gamma"):
        del saved["config"][key]
    path.write_text(json.dumps(saved))
    assert made.begin() == identity
    path.write_text(json.dumps(saved))
    assert "objective.gamma (1.0 -> 0.9)" in made.refusal(objective={"gamma": 0.9})
    teacher = made.refusal(objective={"teacher": {}})
    assert "objective.teacher.weight (null -> " in teacher, "the defaults of a section that was off are a change"


def test_a_run_from_before_a_teacher_could_scale_was_distilled(made: Made) -> None:
    identity = made.begin(objective={"teacher": {}})
    path = made.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    for key in ("use", "bound"):
        del saved["config"][f"objective.teacher.{key}"]
    path.write_text(json.dumps(saved))
    assert made.begin(objective={"teacher": {}}) == identity
    path.write_text(json.dumps(saved))
    refusal = made.refusal(objective={"teacher": {"use": "scale"}})
    assert 'objective.teacher.use ("distill" -> "scale")' in refusal


def test_a_run_without_local_credit_is_not_continued_with_it(made: Made) -> None:
    """An earlier version wrote lam=0.95 with every run, and read it with a critic alone."""
    made.begin(objective={"local_coef": 0})
    path = made.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    del saved["config"]["objective.local_coef"]
    saved["config"]["objective.lam"] = 0.95
    path.write_text(json.dumps(saved))
    refusal = made.refusal()
    assert "objective.local_coef (0.0 -> 0.3)" in refusal
    assert "k3 without the ratio of the policies" in refusal
    assert "objective.lam" not in refusal


def test_a_run_with_a_critic_is_continued(made: Made) -> None:
    critic = {"advantages": "gae"}
    made.begin(objective=critic)
    path = made.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    del saved["config"]["objective.local_coef"]
    path.write_text(json.dumps(saved))
    made.begin(objective=critic)


def test_a_removed_key_that_changes_nothing_is_no_difference(made: Made) -> None:
    made.begin()
    path = made.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    saved["config"]["objective.rewards.cover"] = "any"
    path.write_text(json.dumps(saved))
    made.begin()
    saved["config"]["objective.rewards.cover"] = "half"
    path.write_text(json.dumps(saved))
    assert "objective.rewards.cover" in made.refusal()


def test_sources_without_a_function_import_no_module_of_their_name(made: Made) -> None:
    for name in ("task", "metric"):
        made.write(f"{name}.py", "raise SystemExit('imported')\n")
    sources = [{"source": "task"}, {"source": "metric:tone"}, {"source": f"{made.module}_reward:pay"}]
    contents = made.begin(objective={"outcome_rewards": sources}).contents
    paid = [key for key in contents if key.startswith("objective.")]
    assert paid == [f"objective.outcome_rewards.{made.module}_reward:pay"]
