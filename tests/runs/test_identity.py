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


class Inputs:
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
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    inputs = Inputs(tmp_path / "here", f"function_of_{tmp_path.name}")
    monkeypatch.syspath_prepend(str(inputs.root))
    return inputs


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
def test_a_change_behind_a_name_is_refused_until_its_hash_is_accepted(inputs: Inputs, file: str, key: str) -> None:
    part = key.partition(".")[0]
    file = file.format(module=inputs.module)
    key = key.format(module=inputs.module)
    before = inputs.begin().contents[key]
    content = (inputs.root / file).read_text()

    inputs.write(file, content + " ")
    second = Identity.from_config(inputs.job()).contents[key]
    assert f"made with other inputs: the content of {key} (hash {before} -> {second})" in inputs.refusal()
    assert f"run.accept=[{part}:{second}]' goes on" in inputs.refusal()
    assert second in inputs.refusal(f"{part}:{before}"), "the hash of the old content accepts nothing"

    change = ContentChange(key=key, before=before, after=second)
    assert inputs.begin(f"{part}:{second}").accepted == (change,)
    assert json.loads((inputs.root / "runs/own" / IDENTITY_FILE).read_text())["accepted"] == [change.model_dump()]
    assert inputs.begin().accepted == (change,), "the next plain start goes on"

    inputs.write(file, content + "  ")
    third = Identity.from_config(inputs.job()).contents[key]
    refusal = inputs.refusal(f"{part}:{second}")  # a line that is left in a YAML file
    assert f"run.accept=[{part}:{third}]" in refusal


def test_a_change_that_comes_again_is_accepted_again_and_not_by_the_line_of_the_first_time(inputs: Inputs) -> None:
    inputs.begin()
    hashes = []
    for content in ("b", "c"):
        inputs.write("train.jsonl", content)
        hashes.append(Identity.from_config(inputs.job()).contents["data.path"])
        inputs.begin(f"data:{hashes[-1]}")
    inputs.write("train.jsonl", "b")
    lines = [f"data:{content_hash}" for content_hash in hashes]
    assert f"run.accept=[{lines[0]},{lines[0]}]" in inputs.refusal(*lines)
    assert len(inputs.begin(*lines, lines[0]).accepted) == 3


def test_what_is_accepted_is_that_change_alone(inputs: Inputs) -> None:
    inputs.begin()
    inputs.write("train.jsonl", "other")
    inputs.write("heldout.jsonl", "other")
    contents = Identity.from_config(inputs.job()).contents
    tokens = f"data:{contents['data.path']}", f"eval_data:{contents['eval_data.path']}"
    assert tokens[0].removeprefix("data:") == tokens[1].removeprefix("eval_data:"), "the same content"
    assert f"run.accept=[{tokens[1]}]" in inputs.refusal(tokens[0])
    assert "objective.lam" in inputs.refusal(*tokens, objective={"lam": 0.5}), "no setting is accepted by it"
    assert inputs.begin(*tokens).contents == contents


def test_a_moved_folder_with_the_same_contents_goes_on(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    before = inputs.begin()
    there = inputs.root.with_name("there")
    inputs.root.rename(there)
    inputs.root = there
    monkeypatch.syspath_prepend(str(there))
    for module in (inputs.module, f"{inputs.module}_reward"):
        monkeypatch.delitem(sys.modules, module)  # as in another process
    assert inputs.begin() == before
    shutil.copy(there / "train.jsonl", there / "renamed.jsonl")
    named = with_overrides(inputs.job(), {"data.path": str(there / "renamed.jsonl")})
    assert check_identity(there / "runs" / "own", Identity.from_config(named)) == before


def test_several_data_files_are_their_contents_in_order_whatever_their_names(inputs: Inputs) -> None:
    def begin(*names: str) -> Identity:
        paths = [str(inputs.root / name) for name in names]
        identity = Identity.from_config(with_overrides(inputs.job(), {"data.path": paths}))
        assert "data.path" not in identity.config
        return identity

    assert begin("train.jsonl").contents == inputs.begin().contents, "a list of one is that one"
    (inputs.root / "more").mkdir()
    inputs.write("more/part.jsonl", "more")
    before = begin("train.jsonl", "more").contents["data.path"]
    (inputs.root / "train.jsonl").rename(inputs.root / "renamed.jsonl")
    (inputs.root / "more").rename(inputs.root / "moved")
    assert begin("renamed.jsonl", "moved").contents["data.path"] == before
    assert begin("moved", "renamed.jsonl").contents["data.path"] != before, "another order of the prompts"
    inputs.write("moved/part.jsonl", "other")
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


def test_an_annotation_compares_its_data_record_by_record(inputs: Inputs) -> None:
    config = {"data": {"path": str(inputs.root / "train.jsonl")}, "annotate": {"source": f"{inputs.module}:judge"}}
    before = Identity.from_config(AnnotateJob.model_validate(config))
    inputs.write("train.jsonl", "other")
    assert Identity.from_config(AnnotateJob.model_validate(config)) == before
    inputs.write(f"{inputs.module}.py", FUNCTION + "\n")
    after = Identity.from_config(AnnotateJob.model_validate(config))
    assert before.contents.keys() == after.contents.keys() == {"annotate.source"}
    assert before.contents != after.contents


def test_what_is_not_there_yet_is_compared_once_it_is(inputs: Inputs) -> None:
    (inputs.root / "model").rename(inputs.root / "later")
    inputs.begin()
    (inputs.root / "later").rename(inputs.root / "model")
    assert "model.policy" in inputs.begin().contents
    inputs.write("model/model.safetensors", "other")
    assert "the content of model.policy" in inputs.refusal()


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
    sections = {"learner": learner, "objective": objective}
    save_identity(tmp_path, first := Identity.from_config(job(**sections)))
    assert first.config["learner.schedule_steps"] == spans
    longer = Identity.from_config(job(**sections, num_steps=9))
    if spans == 3:
        with pytest.raises(UserError) as error:
            check_identity(tmp_path, longer)
        assert "learner.schedule_steps (3 -> 9)" in str(error.value)
        assert "learner.schedule_steps=3 keeps the learning-rate schedule whatever num_steps is" in str(error.value)
        sections["learner"] = learner | {"schedule_steps": 3}
        longer = Identity.from_config(job(**sections, num_steps=9))
    check_identity(tmp_path, longer)


@pytest.mark.parametrize("content", [None, "", "[]", '{"fingerprint": "9a"}', '{"format": 2, "config": {}}'])
def test_a_folder_of_another_layout_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    if content is not None:
        (tmp_path / IDENTITY_FILE).write_text(content)
    with pytest.raises(UserError, match=r"by another version of this program.*take another run\.name"):
        load_result(tmp_path, Identity.from_config(job()), "summary.json")


def test_a_result_is_returned_for_the_same_identity(inputs: Inputs) -> None:
    identity = inputs.begin()
    folder = inputs.root / "runs" / "own"
    assert load_result(folder, identity, "summary.json") is None
    (folder / "summary.json").write_text(json.dumps({"steps": 3}))
    assert load_result(folder, Identity.from_config(inputs.job()), "summary.json") == {"steps": 3}
    inputs.write("train.jsonl", "other")
    with pytest.raises(UserError, match=r"the content of data\.path"):
        load_result(folder, Identity.from_config(inputs.job()), "summary.json")
    after = Identity.from_config(inputs.job()).contents["data.path"]
    assert load_result(folder, Identity.from_config(inputs.job(f"data:{after}")), "summary.json") == {"steps": 3}
    assert load_identity(folder).contents["data.path"] == after


def test_missing_content_is_refused_by_name_and_cannot_be_accepted(inputs: Inputs) -> None:
    (inputs.root / "human.jsonl").rename(inputs.root / "later.jsonl")
    assert "feedback.human_file" not in inputs.begin().contents
    (inputs.root / "later.jsonl").rename(inputs.root / "human.jsonl")
    inputs.begin()  # content that appears after the first start is no change
    before = inputs.begin().contents["data.path"]
    (inputs.root / "train.jsonl").unlink()
    refusal = inputs.refusal()
    assert f"the content of data.path (hash {before} -> missing)" in refusal
    assert "run.accept" not in refusal


def test_a_key_that_an_earlier_version_did_not_have_counts_as_its_default(inputs: Inputs) -> None:
    identity = inputs.begin()
    path = inputs.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    for key in ("feedback.style.spans", "feedback.align", "objective.gamma"):
        del saved["config"][key]
    path.write_text(json.dumps(saved))
    assert inputs.begin() == identity
    path.write_text(json.dumps(saved))
    assert "objective.gamma (1.0 -> 0.9)" in inputs.refusal(objective={"gamma": 0.9})
    teacher = inputs.refusal(objective={"teacher": {}})
    assert "objective.teacher.weight (null -> " in teacher, "the defaults of a section that was off are a change"


def test_a_run_from_before_a_teacher_could_scale_was_distilled(inputs: Inputs) -> None:
    identity = inputs.begin(objective={"teacher": {}})
    path = inputs.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    for key in ("use", "bound"):
        del saved["config"][f"objective.teacher.{key}"]
    for earlier in ({}, {"objective.teacher.use": "distill", "objective.teacher.bound": 4.0}):
        path.write_text(json.dumps(saved | {"config": saved["config"] | earlier}))
        assert inputs.begin(objective={"teacher": {}}) == identity
    path.write_text(json.dumps(saved))
    refusal = inputs.refusal(objective={"teacher": {"use": "scale"}})
    assert 'objective.teacher.use ("distill" -> "scale")' in refusal


def test_a_run_without_local_credit_is_not_continued_with_it(inputs: Inputs) -> None:
    """An earlier version wrote lam=0.95 with every run, and read it with a critic alone."""
    inputs.begin(objective={"local_coef": 0})
    path = inputs.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    del saved["config"]["objective.local_coef"]
    saved["config"]["objective.lam"] = 0.95
    path.write_text(json.dumps(saved))
    refusal = inputs.refusal()
    assert "objective.local_coef (0.0 -> 0.3)" in refusal
    assert "k3 without the ratio of the policies" in refusal
    assert "objective.lam" not in refusal


def test_a_run_with_a_critic_is_continued(inputs: Inputs) -> None:
    critic = {"advantages": "gae"}
    inputs.begin(objective=critic)
    path = inputs.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    del saved["config"]["objective.local_coef"]
    path.write_text(json.dumps(saved))
    inputs.begin(objective=critic)


def test_a_removed_key_that_changes_nothing_is_no_difference(inputs: Inputs) -> None:
    inputs.begin()
    path = inputs.root / "runs/own" / IDENTITY_FILE
    saved = json.loads(path.read_text())
    saved["config"]["objective.rewards.cover"] = "any"
    path.write_text(json.dumps(saved))
    inputs.begin()
    saved["config"]["objective.rewards.cover"] = "half"
    path.write_text(json.dumps(saved))
    assert "objective.rewards.cover" in inputs.refusal()


def test_sources_without_a_function_import_no_module_of_their_name(inputs: Inputs) -> None:
    for name in ("task", "metric"):
        inputs.write(f"{name}.py", "raise SystemExit('imported')\n")
    sources = [{"source": "task"}, {"source": "metric:tone"}, {"source": f"{inputs.module}_reward:pay"}]
    contents = inputs.begin(objective={"outcome_rewards": sources}).contents
    paid = [key for key in contents if key.startswith("objective.")]
    assert paid == [f"objective.outcome_rewards.{inputs.module}_reward:pay"]


def test_artifacts_without_their_contents_cannot_be_compared(inputs: Inputs) -> None:
    """As a teacher evaluation wrote its identity when a job's config kept placeholders."""
    identity = Identity.from_config(inputs.job())
    old_paths = {"model.policy": "${artifacts}/base/model", "data.path": "${artifacts}/world/train.jsonl"}
    contents = {key: digest for key, digest in identity.contents.items() if key not in old_paths}
    old = identity.model_copy(update={"config": identity.config | old_paths, "contents": contents})
    save_identity(inputs.root / "runs" / "own", old)
    refusal = inputs.refusal()
    assert "in place of the contents of model.policy, data.path" in refusal
    assert "take another run.name" in refusal and "null" not in refusal
