"""What nobody vouches for, by the thousand: it is read, or refused in a sentence, and nothing else happens.

Minutes long; the rooms' own tests have the cases by hand. Each example works in a folder of its own.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import yaml
from fakes import letter_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from report.test_html import Page, assert_offline

from t2g.config import PolicyJob, WorkersConfig, loading
from t2g.data.load import read_file
from t2g.errors import UserError
from t2g.feedback import decode, token_offsets
from t2g.feedback.parse import load_answer, make_feedback, parse_answer, read_judgement
from t2g.feedback.records import AnnotatedRecord, read_record
from t2g.report.run_page import report_run
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.control import CONTROL_FILE, STATUS_FILE, Control, read_status
from t2g.runs.journal import Journal, read_journal
from t2g.tasks.code import extract_code
from t2g.types import Span

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
TEXT = st.text(st.characters(), max_size=60) | st.sampled_from(
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=a()>',
        "é\u0301",
        "\ud83d",
        "```py\n",
        "\u2028",
        "{{ 7 * 7 }}",
        "",
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)


VALUES = st.recursive(SCALARS, containers, max_leaves=12)
BYTES = st.binary(max_size=80)
examples = lambda count: settings(max_examples=count, deadline=None)  # noqa: E731


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Something whole with pieces cut out, turned round, or put in."""
    data = draw(whole)
    for _ in range(draw(st.integers(0, 3))):
        begin, end = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        data = data[:begin] + draw(st.just(b"") | BYTES | st.just(data[begin:end] * 2)) + data[end:]
    return data


@st.composite
def changed(draw: st.DrawFn, whole: dict[str, Any]) -> dict[str, Any]:
    """An object with some fields, at any depth, gone or of another kind."""
    known = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(0, 3))):
        place = known
        while True:
            key = draw(st.sampled_from(sorted(place)))
            if not (isinstance(place[key], dict) and place[key] and draw(st.booleans())):
                break
            place = place[key]
        place[key] = draw(VALUES)
    return known


def lines(*values: Any) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


# --------------------------------------------------------------------------------------------------- answers and texts
ANSWER = {
    "critique": "It says phone.",
    "good": ["by Ann"],
    "poor": [{"quote": "phone", "occurrence": 2, "severity": 3}],
}


def check_spans(spans: tuple[Span, ...], response: str) -> None:
    assert all(0 <= span.start < span.end <= len(response) and span.label in (1, -1) for span in spans)


@examples(1500)
@given(damaged(changed(ANSWER).map(lambda answer: json.dumps(answer).encode())), TEXT | st.just("by Ann, phone, phone"))
def test_parser(answer: bytes, response: str) -> None:
    text = answer.decode(errors="surrogateescape")
    feedback = parse_answer(text, response, source="s", version="v")
    check_spans(feedback.spans, response)
    assert feedback.status in ("ok", "empty", "unparsable")
    assert len(feedback.spans) <= feedback.num_located <= feedback.num_quotes
    code, start = extract_code(text + response)
    assert (text + response)[start : start + len(code)] == code
    assert isinstance(load_answer(text, {"critique": str}), dict | str)


@examples(1000)
@given(VALUES, TEXT)
def test_judgements_of_programs_and_records(value: Any, response: str) -> None:
    for judgement in (value, ("c", value, []), {"critique": "c", "good": [], "poor": [], "execution": value}):
        with suppress(ValueError):  # in a sentence
            feedback = read_judgement(judgement, response, source="s", version="v")
            check_spans(feedback.spans, response)
            json.dumps(feedback.execution, allow_nan=False).encode()
    with suppress(ValueError):
        read_record({"prompt": "p", "response": response, "critique": "c", "spans": value, "payload": {"a": value}})
    check_spans(make_feedback("c", [response], [], response, source="s", version="v").spans, response)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@examples(500)
@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 300), max_size=60))
def test_offsets(tokenizer: Any, ids: list[int]) -> None:
    text = decode(tokenizer, ids)
    offsets = token_offsets(tokenizer, np.asarray(ids, np.int64))
    assert offsets.shape == (len(ids), 2)
    assert (np.diff(offsets[:, 0]) >= 0).all()
    assert set(range(len(text))) == {at for start, end in offsets.tolist() for at in range(start, end)}


RECORD = {"prompt": "p", "response": "by Ann, phone", "critique": "c", "good": ["Ann"], "payload": {"test": "x"}}


@examples(600)
@given(
    st.sampled_from([".json", ".jsonl", ".csv", ".parquet"]), damaged(changed(RECORD).map(lambda row: lines(row, row)))
)
def test_data_files(suffix: str, content: bytes) -> None:
    with TemporaryDirectory() as folder, suppress(UserError):
        path = Path(folder, f"data{suffix}")
        path.write_bytes(content)
        assert all(isinstance(row, dict) for _, row in read_file(path))


# ---------------------------------------------------------------------------------------------- journal and checkpoint
def record(number: int, payload: Any) -> AnnotatedRecord:
    return AnnotatedRecord(prompt_id=str(number), prompt="p\n", response="é", critique="c", payload={"a": payload})


@examples(300)
@given(st.lists(st.integers() | st.text(max_size=20), min_size=1, max_size=5), st.data())
def test_journal_cuts(payloads: list[Any], data: st.DataObject) -> None:
    """Cut off anywhere, the whole lines before are kept, and it goes on behind them."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "journal.jsonl")
        records = [record(i, payload) for i, payload in enumerate(payloads)]
        with closing(Journal(path)) as journal:
            for one in records:
                journal.append(one)
        content = path.read_bytes()
        end = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:end])
        complete = records[: content[:end].count(b"\n")]
        assert read_journal(path, AnnotatedRecord) == complete
        with closing(Journal(path)) as journal:
            journal.append(records[-1])
        assert read_journal(path, AnnotatedRecord) == [*complete, records[-1]]
        path.write_bytes(data.draw(damaged(st.just(content))))
        with suppress(UserError):
            read_journal(path, AnnotatedRecord)


def replaced(put: Callable[[Path], Any]) -> Callable[[Path, bytes], None]:
    def damage(path: Path, _content: bytes) -> None:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        put(path)

    return damage


def overwritten(path: Path, content: bytes) -> None:
    if path.is_file():
        path.write_bytes(content)


def cut(path: Path, _content: bytes) -> None:
    if path.is_file():
        os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "overwritten": overwritten,
    "cut": cut,
    "gone": replaced(lambda path: None),
    "folder": replaced(Path.mkdir),
    "pipe": replaced(os.mkfifo),
}
DAMAGES["loop"] = replaced(lambda path: path.symlink_to(path.name))
DAMAGES["endless"] = replaced(lambda path: path.symlink_to("/dev/zero"))
DAMAGES["link to another"] = replaced(lambda path: path.symlink_to("../step-00000001"))


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(sorted(DAMAGES)), BYTES), min_size=1, max_size=4))
def test_checkpoint_damage(damages: list[tuple[int, str, bytes]]) -> None:
    """With run.resume=readable `latest` and `best` give what is whole or nothing, and the run goes on writing."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        store = CheckpointStore(Path(name), keep=3)
        for step in (1, 2, 3):
            store.write(step, lambda to, step=step: (to / "w").write_text(f"weights {step}"), {"step": step})
        store.keep_best(2, lambda to: (to / "w").write_text("best"), 0.5)
        for number, damage, content in damages:
            paths = sorted(path for path in folder.rglob("*"))
            with suppress(OSError):  # of the damage to what is damaged already
                DAMAGES[damage](paths[number % len(paths)], content) if paths else None
        store = CheckpointStore(folder, keep=3, skip_unreadable=True)
        if (latest := store.latest()) is not None:
            path, state = latest
            assert (path / "w").read_text() == f"weights {state['step']}"
        if (best := store.best()) is not None:
            assert ((best[0] / "w").read_text(), best[1]) == ("best", 0.5)
        store.write(4, lambda to: (to / "w").write_text("weights 4"), {"step": 4})
        assert store.latest() == (folder / "step-00000004", {"step": 4})
        assert store.keep_best(4, lambda to: (to / "w").write_text("new"), 0.75)
        assert store.best()[1] == 0.75


# ------------------------------------------------------------------------------------------- control, configs, reports
STATUS = {
    "step": 1,
    "num_steps": 2,
    "samples": 3,
    "updated": "2026-11-21T12:00:00Z",
    "fleets": [],
    "idle": {"learner": 0.5},
}


@examples(800)
@given(damaged(changed({"rollouts": 3, "rewards": None}).map(lines)), damaged(changed(STATUS).map(lines)))
def test_control_files(control: bytes, status: bytes) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CONTROL_FILE).write_bytes(control)
        (folder / STATUS_FILE).write_bytes(status)
        changes = Control(folder, {"rollouts": WorkersConfig(max=4)}).read_changes()
        assert changes == {} or (changes.keys() == {"rollouts"} and 1 <= changes["rollouts"] <= 4)
        with suppress(UserError):
            read_status(folder)


SHIPPED = yaml.safe_load((ROOT / "configs" / "tiny" / "policy.yaml").read_text())


@examples(300)
@given(changed(SHIPPED), st.data(), st.lists(st.sampled_from(["num_steps", "data", "x"]) | TEXT, max_size=2))
def test_config_files(values: dict[str, Any], data: st.DataObject, overrides: list[str]) -> None:
    text = yaml.safe_dump(values, allow_unicode=True)
    content = data.draw(
        damaged(st.just(text.encode(errors="surrogatepass")))
        if data.draw(st.booleans())
        else st.just(text.encode(errors="replace"))
    )
    with TemporaryDirectory() as name, suppress(UserError):
        file = Path(name, "job.yaml")
        file.write_bytes(content)
        config_overrides = [f"{override}={data.draw(TEXT)}" for override in overrides]
        job = loading.load(PolicyJob, file, config_overrides, environ={}, cwd=Path(name))
        file.write_text(loading.to_yaml(job), encoding="utf-8")
        assert loading.load(PolicyJob, file, environ={}, cwd=Path(name)) == job


METRICS = {"step": 1, "samples": 64.0, "eval/f1": 0.5, "policy/kl": 0.25, "reward/token_mean": None}
SUMMARY = {
    "steps": 2,
    "samples": 128,
    "base": {"f1": 0.5},
    "timing": {"ppo": 75.0},
    "versions": {"t2g": "1"},
    "reward_model": {"f1": 0.5},
}
SAMPLE = {
    "step": 1, "split": "train", "prompt_id": "1", "sample_index": 0, "prompt": "p", "response": "by Ann",
    "finish_reason": "stop", "feedback": {
        "critique": "bad", "spans": [{"start": 0, "end": 2, "label": -1, "severity": 2, "critique_range": [0, 3]}],
        "status": "ok", "source": "s", "version": "v",
    },
}  # fmt: skip


@examples(120)
@given(changed(METRICS), changed(SUMMARY), st.lists(changed(SAMPLE), max_size=2), st.booleans())
def test_reports(metrics: dict[str, Any], summary: dict[str, Any], samples: list[Any], finished: bool) -> None:
    """Whatever the run folder holds, a page has no tag, no attribute and no address but the template's own."""
    with TemporaryDirectory() as name, suppress(UserError):
        folder = Path(name)
        (folder / "metrics.jsonl").write_bytes(lines(metrics, {"step": 2, "eval/f1": 0.75}))
        (folder / "samples.jsonl").write_bytes(lines(*samples))
        if finished:
            (folder / "summary.json").write_bytes(lines(summary))
        assert_offline(Page(report_run(folder).read_text(encoding="utf-8")))
