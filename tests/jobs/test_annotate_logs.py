"""jobs.annotate on logged conversations: the folder of `t2g init --template repair`, and logs that grow."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import __main__ as console
from jobs.annotate.annotation_job import READ_SAMPLES, complete_annotation, describe
from jobs.annotate.annotation_runs import read_samples
from jobs.common.cli import main
from jobs.starter.repair.feedback import locate
from t2g.config import AnnotateJob, PolicyJob, loading
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.environments.code_repair import CodeRepair
from t2g.tasks.base import get_task
from t2g.tasks.code import CodeTask

SUFFIX = 'Traceback: file "app.py", line 2'


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*overrides: str) -> int:
    return main(
        AnnotateJob, complete_annotation, describe, ["--config", "annotate.yaml", *overrides], read=READ_SAMPLES
    )


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert console.main(["init", str(tmp_path / "mine"), "--template", "repair"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.delitem(sys.modules, "feedback", raising=False)
    return tmp_path / "mine"


def test_the_starter_annotates_its_conversations(starter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {file.name for file in starter.iterdir()} == {
        "README.md", "annotate.yaml", "feedback.py", "logs.jsonl", "policy.yaml", "programs.jsonl",
    }  # fmt: skip
    assert run("--dry-run") == 0
    out = capsys.readouterr().out
    assert f"each of the assistant's turns with a reply in {starter / 'logs.jsonl'}" in out
    assert "aligned by feedback:locate; records of 10% of the conversations" in out and not (starter / "runs").exists()
    assert run() == 0
    folder = starter / "runs" / "my-logs"
    records = read(folder / "annotated.jsonl")
    replies = []
    for row in read(starter / "logs.jsonl"):
        texts = [message["content"] for message in row["messages"]]
        for i in range(1, len(texts) - 1, 2):
            turn = i // 2 + 1
            replies.append((f"{row['id']}/{turn}", texts[i], texts[i + 1]))
    assert [(r["prompt_id"], r["response"], r["critique"]) for r in records] == replies
    assert len(records) == 16
    assert {r["status"] for r in records} == {"ok"}
    assert {r["source"] for r in records} == {"next_message"}
    quotes = {}
    for r in records:
        quotes[r["prompt_id"]] = [r["response"][s["start"] : s["end"]] for s in r["spans"]]
    assert quotes["mean/1"] == ["length"]
    assert quotes["area/1"] == ["radius * 2", "3.14"]
    assert quotes["last/1"] == ["    return items[-1]"]
    assert {r["prompt_id"]: r["spans"][0]["label"] for r in records} == {r: 1 if r[-1] == "2" else -1 for r in quotes}
    summary = json.loads((folder / "annotated.json").read_text())
    assert summary["left_out"] == [[1, "data record 1 (logs.jsonl:1): the assistant's turn 3 has no reply"]]
    train = {r["prompt_id"].split("/")[0] for r in read(folder / "train.jsonl")}
    heldout = {r["prompt_id"].split("/")[0] for r in read(folder / "heldout.jsonl")}
    assert train and heldout and not train & heldout  # all turns of a conversation are on one side
    assert summary["train_records"] + summary["heldout_records"] == 16


def test_the_starter_repairs_programs_by_their_tests(starter: Path) -> None:
    config = loading.load(PolicyJob, starter / "policy.yaml", ["model.policy=some/model"], environ={})
    prompts = make_prompts(load_records(config.data), get_task(config.task), None, 0)
    repair = CodeRepair(CodeTask(), config.feedback.sandbox)
    clamp = "def clamp(value, low, high):\n    return {}"
    answers = [clamp.format(body) for body in ("value", "max(low, min(value, high))")]
    wrong, right = (repair.reply(prompts[-1], [{"role": "assistant", "content": answer}]) for answer in answers)
    assert (wrong.done, right.done, right.metrics) == (False, True, {"passed": 1.0})
    assert "test_outside" in wrong.text and "test_inside" not in wrong.text


def test_a_log_that_grows_has_only_its_new_turns_judged(starter: Path) -> None:
    folder = starter / "runs" / "my-logs"
    assert run("data.limit=3") == 0
    judged = read(folder / "journal.jsonl")
    with (starter / "feedback.py").open("a") as file:
        file.write("\nBROKEN = 1\n")
    assert run() == 2  # another source of the function that aligns
    text = (starter / "feedback.py").read_text()
    (starter / "feedback.py").write_text(text.removesuffix("\nBROKEN = 1\n"))
    rows = read(starter / "logs.jsonl")
    rows[0]["messages"].append({"role": "user", "content": "Thanks!"})
    (starter / "logs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run() == 0
    journal = read(folder / "journal.jsonl")
    assert journal[:6] == judged and len(journal) == 17  # mean/3 has a reply now
    assert [r["prompt_id"] for r in read(folder / "annotated.jsonl")][:3] == ["mean/1", "mean/2", "mean/3"]
    assert run() == 0
    assert len(read(folder / "journal.jsonl")) == 17


def test_a_folder_of_logs_without_an_aligner(starter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = starter / "logs"
    logs.mkdir()
    chat = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Ho"},
        {"from": "human", "value": '"Ho" is odd.'},
    ]
    (logs / "a.jsonl").write_text(json.dumps({"conversations": chat}) + "\n")
    parts = [{"type": "text", "text": "Hi"}]
    row = {"id": "b", "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Ha"}, CALLED]}
    (logs / "b.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"messages": [{"role": "bot"}]}) + "\n")
    assert run("data.path=logs", "annotate.align=null", "run.name=other") == 0
    first, second, broken = read(starter / "runs" / "other" / "annotated.jsonl")
    assert (first["prompt"], first["response"], first["critique"]) == ("Hi", "Ho", '"Ho" is odd.')
    assert (first["spans"], first["status"], first["poor"]) == ([], "empty", [])  # a label would be a guess
    assert (second["prompt_id"], second["critique"], second["data_file"]) == ("b/1", "rain", "b.jsonl")
    assert broken["reason"].startswith("data record 3 (b.jsonl:2): messages[0] is {'role': 'bot'")
    (logs / "b.jsonl").unlink()
    (logs / "a.jsonl").write_text(json.dumps({"conversations": chat[:2]}) + "\n")
    assert run("data.path=logs", "run.name=none", "--dry-run") == 2
    assert (
        "no record can be judged; data record 1 (a.jsonl:1): the assistant's turn 1 has no reply"
        in capsys.readouterr().err
    )


def test_names_of_the_data_are_printed_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "p", "response": "r"}, {"prompt": "p", "\x1b[2J": 1}]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = AnnotateJob.model_validate(
        {
            "run": {"root": str(tmp_path)}, "task": "prompts", "data": {"path": str(data)},
            "annotate": {"source": "human"},
        }
    )  # fmt: skip
    read_samples(job)
    assert "data record 2 (data.jsonl:2) has no response; it has prompt, ␛[2J\n" in capsys.readouterr().out


CALLED = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def test_a_smoke_run_takes_turns_that_have_a_reply(starter: Path) -> None:
    alone = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    text = (starter / "logs.jsonl").read_text()
    (starter / "logs.jsonl").write_text("".join(json.dumps(alone | {"id": f"x{i}"}) + "\n" for i in range(9)) + text)
    assert run("run.smoke=true") == 0
    assert len(read(starter / "runs" / "my-logs" / "smoke" / "annotated.jsonl")) == 8


def test_the_starter_function_finds_quotes_then_lines_of_the_program() -> None:
    response = "Here:\n```python\nx = 1\ny = z\n```"
    assert locate("", response, "`z` is not defined, line 1") == ("`z` is not defined, line 1", [], ["z"])
    assert locate("", response, SUFFIX)[1:] == ([], ["y = z"])
    assert locate("", response, "line 0, line 9, 'nothing'")[1:] == ([], [])
    assert locate("", response, "All tests passed.")[1:] == ([response], [])
