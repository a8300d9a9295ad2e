"""jobs.annotate as users start it: killed and started again against an endpoint that fails, and on published files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_endpoint import FakeEndpoint, Reply, answer, completion, fake_endpoint, says, span

from jobs.annotate.annotation_job import complete_annotation as run
from jobs.annotate.annotation_job import describe
from jobs.annotate.annotation_runs import ANNOTATED_FILE, DONE_FILE, HELDOUT_FILE, JOURNAL_FILE, TRAIN_FILE
from jobs.common.cli import main
from t2g.config import AnnotateJob

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
READ = "jobs.annotate.annotation_runs:read_samples"
NUM_RECORDS = 40
DEADLINE_S = 60


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as server:
        yield server


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is perhaps not there yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def asked_about(body: dict[str, Any]) -> str:
    """Which record a request is about."""
    text = body["messages"][0]["content"]
    return text[text.index("question ") :].split()[1]


def flaky(number: int, body: dict[str, Any]) -> Reply:
    """Every fifth request fails, each time in another way; the others answer after a while."""
    slow_down = Reply(429, {"error": {"message": "slow down"}}, headers={"Retry-After": "0.02"})
    cut_off = Reply(200, completion(answer("Fine.")), missing_bytes=20)
    lost_quote = says(answer("Wrong.", span("not there", "poor", phrase="Wrong")))
    half_an_answer = says(answer("Wrong.")[:30])
    oops = Reply(500, "<html>oops</html>")
    later = Reply(503, "<html>later</html>")
    ways = (slow_down, oops, cut_off, lost_quote, later, half_an_answer)
    if number % 5 == 0:
        return ways[number // 5 % len(ways)]
    return Reply(body=completion(answer("Wrong.", span("answer", "poor", phrase="Wrong"))), delay_s=0.03)


def start(config: Path, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.annotate", "--config", config], cwd=ROOT, env=os.environ | {"SOME_KEY": "any"},
        stdout=(folder / "out.txt").open("ab"), stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_job_that_is_killed_again_and_again_makes_each_record_once(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    endpoint.reply = flaky
    ids = [f"r{i}" for i in range(NUM_RECORDS)]
    rows = [{"id": i, "prompt": f"question {i} ?", "response": f"The answer is {i}."} for i in ids]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    llm = {"url": endpoint.url, "model": "judge", "key_env": "SOME_KEY", "concurrency": 3}
    config = tmp_path / "annotate.yaml"
    annotate = {"source": "llm", "llm": llm}
    job = {"run": {"root": str(tmp_path), "name": "run"}, "data": {"path": str(tmp_path / "data.jsonl")}}
    config.write_text(json.dumps(job | {"annotate": annotate}))
    journal = tmp_path / "run" / JOURNAL_FILE

    for number, until in ((signal.SIGKILL, 10), (signal.SIGTERM, 24)):
        known = {row["prompt_id"] for row in read(journal)}
        num_requests = len(endpoint.requests)
        process = start(config, tmp_path)
        deadline = time.monotonic() + DEADLINE_S
        while len(read(journal)) < until:
            assert process.poll() is None, (tmp_path / "out.txt").read_text()
            assert time.monotonic() < deadline, (tmp_path / "out.txt").read_text()
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait(timeout=DEADLINE_S) == (-9 if number == signal.SIGKILL else 143)
        received_requests = {asked_about(body) for body in endpoint.requests[num_requests:]}
        assert known & received_requests == set(), "paid for twice"
        if number == signal.SIGTERM:
            assert received_requests <= {row["prompt_id"] for row in read(journal)}, "paid for, and lost"
        assert not (tmp_path / "run" / DONE_FILE).exists()
    assert "stopped by SIGTERM: the same command goes on from here" in (tmp_path / "out.txt").read_text()

    known = {row["prompt_id"] for row in read(journal)}
    num_requests = len(endpoint.requests)
    with journal.open("ab") as file:
        file.write(b'{"prompt_id": "r1", "pro')  # as a power cut leaves it
    assert start(config, tmp_path).wait(timeout=DEADLINE_S) == 0, (tmp_path / "out.txt").read_text()
    assert known & {asked_about(body) for body in endpoint.requests[num_requests:]} == set()

    annotated_rows = read(tmp_path / "run" / ANNOTATED_FILE)
    assert [row["prompt_id"] for row in annotated_rows] == ids
    assert {(row["status"], row["poor"][0]) for row in annotated_rows} == {("ok", "answer")}
    assert sorted(row["prompt_id"] for row in read(journal)) == sorted(ids)
    parts = [row["prompt_id"] for name in (TRAIN_FILE, HELDOUT_FILE) for row in read(tmp_path / "run" / name)]
    assert sorted(parts) == sorted(ids)


def annotated(folder: Path, config: str, *overrides: str) -> list[dict[str, Any]]:
    """The records that the command leaves, run in this process."""
    command = ["--config", str(ROOT / "configs" / config / "annotate.yaml"), f"run.root={folder}", "run.name=run"]
    assert main(AnnotateJob, run, describe, [*command, *overrides], read=READ) == 0
    return read(folder / "run" / ANNOTATED_FILE)


def test_the_code_sample_is_annotated_by_program(tmp_path: Path) -> None:
    file = DATA / "kodcode.jsonl"
    records = annotated(tmp_path, "kodcode", f"data.path={file}", "annotate.source=program")
    rows = read(file)
    assert [record["prompt_id"] for record in records] == [row["question_id"] for row in rows]
    for record, row in zip(records, rows, strict=True):
        faulty = row["faulty_lines"]
        assert record["response"] == row["solution"] and record["critique"]
        assert record["status"] == "ok"
        assert record["execution"]["passed"] is (not faulty)
        assert all({"start", "end", "label", "severity"} <= set(span) for span in record["spans"])
        poor = [span for span in record["spans"] if span["label"] == -1 and span["severity"] == 3]
        lines = {record["response"].count("\n", 0, span["start"]) + 1 for span in poor}
        assert bool(lines & set(faulty)) == bool(faulty)


@pytest.mark.parametrize(
    ("config", "file", "notes"),
    [
        ("slf5k", "slf5k.json", "A human's feedback on this summary:\nIt was the sail"),
        ("ultrafeedback", "ultrafeedback.json", "Right in every point"),
    ],
)
def test_published_samples_are_annotated_by_an_endpoint(
    endpoint: FakeEndpoint, config: str, file: str, notes: str, tmp_path: Path
) -> None:
    """The endpoint praises the first word of the response that it is shown."""
    heading = {"slf5k": "\nSummary:\n", "ultrafeedback": "\nResponse:\n"}[config]

    def reply(number: int, body: dict[str, Any]) -> Reply:
        response = body["messages"][0]["content"].split(heading)[1]
        return says(answer("Well begun.", span(response.split()[0], "good", phrase="begun")))

    endpoint.reply = reply
    records = annotated(
        tmp_path, config, f"data.path={DATA / file}", f"annotate.llm.url={endpoint.url}", "annotate.llm.key_env=PATH"
    )
    rows = json.loads((DATA / file).read_text())
    assert [record["prompt_id"] for record in records] == (
        list(rows) if isinstance(rows, dict) else [row["prompt_id"] for row in rows]
    )
    for record in records:
        first = record["response"].split()[0]
        assert [(s["start"], s["end"], s["label"], s["severity"]) for s in record["spans"]] == [(0, len(first), 1, 1)]
        assert (record["status"], record["critique"], record["source"]) == ("ok", "Well begun.", "llm")
    received_requests = [body["messages"][0]["content"] for body in endpoint.requests]
    assert [records[0]["response"] in content for content in received_requests if notes in content] == [True]
    assert len(received_requests) == len(records)


def test_a_table_of_human_feedback_needs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text('ChatRequest,prompt_id,response,critique,poor\nWhy?,7,"a phone, a phone",Twice.,"[""a phone""]"\n')
    (record,) = annotated(
        tmp_path, "own", f"data.path={file}", "data.columns={prompt: ChatRequest}", "annotate.source=human"
    )
    assert (record["prompt_id"], record["prompt"], record["critique"], record["poor"]) == (
        "7",
        "Why?",
        "Twice.",
        ["a phone"],
    )


def test_critiques_that_people_wrote_are_aligned_by_an_endpoint(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    """SLF5K as it is published: some summaries have a person's feedback, which the endpoint is not asked to repeat."""
    rows = json.loads((DATA / "slf5k.json").read_text())
    with_feedback = {key: row["feedback"] for key, row in rows.items() if row.get("feedback")}

    def reply(number: int, body: dict[str, Any]) -> Reply:
        content = body["messages"][0]["content"]
        quote = content.split("\nSummary:\n")[1].split()[0]
        phrase = next(words.split()[0] for words in with_feedback.values() if words in content)
        return says(json.dumps({"reasoning": "So.", "spans": [span(quote, "poor", phrase=phrase, severity=2)]}))

    endpoint.reply = reply
    overrides = ("annotate.source=human", "annotate.align=llm", "annotate.max_failed_share=1")
    records = annotated(
        tmp_path, "slf5k", f"data.path={DATA / 'slf5k.json'}", f"annotate.llm.url={endpoint.url}",
        "annotate.llm.key_env=PATH", *overrides,
    )  # fmt: skip
    assert {r["prompt_id"]: r["critique"] for r in records if r["status"] == "ok"} == with_feedback
    assert len(endpoint.requests) == len(with_feedback) > 3
    for record in records:
        if record["status"] == "ok":
            assert record["source"] == "human"
            assert record["spans"][0]["severity"] == 2
        else:
            assert record["reason"].endswith("the critique is None; it needs to be a text")
