"""jobs.mark without a browser: what it refuses, and that a kill costs nothing."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from jobs.mark import main

ROOT = Path(__file__).resolve().parents[2]


def start(data: Path) -> tuple["subprocess.Popen[str]", str, str]:
    """The job, the address that it serves, and what it said before."""
    command = [sys.executable, "-m", "jobs.mark", str(data), "--by", "ann"]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = ""
    assert job.stdout is not None
    for line in job.stdout:
        output += line
        if match := re.search(r"go on at (http://127\.0\.0\.1:\d+/\S+/)", line):
            return job, match[1], output
    raise AssertionError(output)


def end(job: "subprocess.Popen[str]", number: signal.Signals) -> tuple[int, str]:
    job.send_signal(number)
    output = job.communicate(timeout=60)[0]
    return job.returncode, output


def test_a_killed_page_goes_on_where_it_was_and_one_process_has_the_folder(tmp_path: Path) -> None:
    data = tmp_path / "my.jsonl"
    rows = [{"prompt": "p", "response": "one two"}, {"prompt": "q", "response": "three"}, {"prompt": "p", "\x1b[2J": 1}]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job, url, output = start(data)
    try:
        assert (
            "1 of 3 records have nothing to mark; data record 3 (my.jsonl:3) has no response; it has prompt, ␛[2J\n"
            in output
            and "0 of 2" in output
        )
        assert main([str(data), "--by", "ann"]) == 2, "another process works there"
        body = {"critique": "one is wrong", "spans": [{"start": 0, "end": 3, "label": -1, "severity": 2}], "done": True}
        headers = {"Content-Type": "application/json", "Origin": url.rpartition("/")[0].rpartition("/")[0]}
        request = urllib.request.Request(f"{url}item/0", json.dumps(body).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
    finally:
        assert end(job, signal.SIGKILL)[0] == -signal.SIGKILL
    job, _, output = start(data)
    assert "1 of 2 responses are marked" in output
    code, output = end(job, signal.SIGTERM)
    path = data.with_suffix(".marks") / "ann" / "annotated.jsonl"
    assert code == 0 and output.endswith(f"1 of 2 responses are marked\nmade: records {path}\n")
    assert "Traceback" not in output
    assert json.loads(path.read_text())["poor"] == [{"quote": "one", "severity": 2}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl", "--by", "ann"], "none.jsonl: there is no such file"),
        (["{}", "--by", "ann", "--task", "nothing"], "task='nothing' is none of"),
        (["{}", "--by", "ann"], "no record can be judged; data record 1 (my.jsonl:1) has no response"),
    ],
)
def test_what_cannot_be_marked_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "my.jsonl").write_text('{"prompt": "p"}\n')
    assert main([one.format(tmp_path / "my.jsonl") for one in arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "../ann", "a/b", "a b"])
def test_a_name_that_is_no_folder_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["my.jsonl", "--by", name])
    assert "becomes a folder's name" in capsys.readouterr().err
