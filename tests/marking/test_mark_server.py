"""Who may ask the server: our own page, with the whole address; and what it answers."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from t2g.errors import UserError
from t2g.loop.annotation import make_samples
from t2g.marking.mark_server import MAX_BYTES, MarkServer
from t2g.marking.marks import Marks
from t2g.tasks.base import get_task

ROWS = [{"prompt": "<b>What?</b>", "response": "a\u202eb 👍 cd"}]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MarkServer]:
    marks = Marks(tmp_path, "ann", make_samples(ROWS, get_task("prompts")))
    with closing(marks), MarkServer(marks) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server
        server.shutdown()
        serving.join(timeout=10)


def ask(
    server: MarkServer, path: str, body: Any = None, *, secret: str | None = None, **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    """The answer to a request of our own page, but for what is given."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.netloc, timeout=10)
    sent = {"Host": address.netloc}
    if body is not None:
        sent |= {"Origin": server.origin, "Content-Type": "application/json"}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    method = "GET" if body is None else "POST"
    try:
        connection.request(method, f"/{secret or server.secret}/{path}", data, {k: v for k, v in sent.items() if v})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_script_of_the_data(server: MarkServer) -> None:
    for name in ("", "mark.js", "mark.css"):
        code, text, headers = ask(server, name)
        assert code == 200 and text
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert "innerHTML" not in text and "http:" not in text and "https:" not in text
    assert "style=" not in ask(server, "")[1]
    assert " on" not in ask(server, "")[1].split("<main>")[0]


def test_items_are_texts_that_steer_nothing(server: MarkServer) -> None:
    code, text, headers = ask(server, "item/0")
    item = json.loads(text)
    assert code == 200 and headers["Content-Type"].startswith("application/json")
    assert (item["prompt"], item["response"]) == ("<b>What?</b>", "a�b 👍 cd")
    assert (item["critique"], item["spans"], item["done"]) == ("", [], False)


def test_what_is_saved_comes_back(server: MarkServer) -> None:
    body = {"critique": "cd is wrong", "spans": [{"start": 6, "end": 8, "label": -1, "severity": 2}], "done": True}
    assert ask(server, "item/0", body)[0] == 200
    span = {"start": 6, "end": 8, "label": -1, "severity": 2, "critique_range": None}
    assert json.loads(ask(server, "item/0")[1])["spans"] == [span]
    assert json.loads(ask(server, "item/0")[1])["version"] == 1
    for fix in ("", "<b>"):
        fixed = body | {"spans": [span | {"fix": fix}], "version": server.marks[0].version}
        assert ask(server, "item/0", fixed)[0] == 200
        assert json.loads(ask(server, "item/0")[1])["spans"] == [span | {"fix": fix}]
    assert json.loads(ask(server, "state")[1]) == {"by": "ann", "finished": [True], "agreements": []}


def test_a_tab_with_an_older_version_changes_nothing(server: MarkServer) -> None:
    assert ask(server, "item/0", {"critique": "first tab", "version": 0})[:2] == (200, '{"version":1}')
    code, words, _ = ask(server, "item/0", {"critique": "stale tab", "version": 0})
    assert code == 409 and "another tab changed this response: reload this page" in words
    assert ask(server, "item/0", {"critique": "reloaded", "version": 1})[:2] == (200, '{"version":2}')
    assert server.marks[0].critique == "reloaded"


def test_a_broken_journal_of_another_person_does_not_stop_the_page(server: MarkServer, tmp_path: Path) -> None:
    (tmp_path / "bea").mkdir()
    (tmp_path / "bea" / "journal.jsonl").write_text("broken\n")
    code, text, _ = ask(server, "state")
    (message,) = json.loads(text)["agreements"]
    assert code == 200 and "with bea: not compared" in message and "journal.jsonl:1 is not a line" in message


@pytest.mark.parametrize("name", ["", "state", "item/0"])
@pytest.mark.parametrize("request_options", [{"secret": "guessed"}, {"Host": "evil.example"}, {"Host": "localhost:1"}])
def test_a_stranger_reads_nothing(server: MarkServer, name: str, request_options: dict[str, str]) -> None:
    code, text, _ = ask(server, name, **request_options)  # type: ignore[arg-type]
    assert code == 403 and "What?" not in text and server.secret not in text


@pytest.mark.parametrize("origin", ["", "null", "http://evil.example", "http://127.0.0.1:1"])
def test_another_page_changes_nothing(server: MarkServer, origin: str) -> None:
    assert ask(server, "item/0", {"done": True}, Origin=origin)[0] == 403
    assert server.marks.finished == [False]


@pytest.mark.parametrize(
    ("name", "body", "code"),
    [
        ("item/1", {"done": True}, 404),
        ("item/-1", {"done": True}, 404),
        ("item/0/../1", {}, 404),
        ("item/0", b"{", 400),
        ("item/0", b'{"critique": "\\ud800"}', 400),
        ("item/0", {"critique": 1}, 400),
        ("item/0", {"severity": 1}, 400),
        ("item/0", {"done": True}, 400),
        ("item/0", {"spans": [{"start": 0, "end": 99, "label": 1}]}, 400),
        ("item/0", {"spans": [{"start": 0, "end": 1, "label": 1, "severity": 4}]}, 400),
        ("item/0", {"spans": [{"start": 0, "end": 1, "label": 1, "fix": "x"}]}, 400),
        ("item/0", {"spans": [{"start": 0, "end": 1, "label": -1, "fix": "x" * 4001}]}, 400),
    ],
)
def test_invalid_input_is_refused_with_a_message(server: MarkServer, name: str, body: Any, code: int) -> None:
    answered, words, _ = ask(server, name, body)
    assert answered == code and words
    assert server.marks.finished == [False]
    assert server.marks[0].critique == ""


def test_a_form_of_another_page_is_no_json(server: MarkServer) -> None:
    assert ask(server, "item/0", {"done": True}, Content_Type="text/plain")[0] == 400


def test_a_request_that_is_too_large_is_not_read(server: MarkServer) -> None:
    assert ask(server, "item/0", {"done": True}, Content_Length=str(MAX_BYTES + 1))[0] == 400
    assert ask(server, "item/0", {"done": True}, Content_Length="many")[0] == 400


def test_only_this_machine_can_reach_it_and_a_taken_port_is_one_sentence(server: MarkServer, tmp_path: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.secret) >= 20
    with pytest.raises(UserError, match="is not available"):
        MarkServer(server.marks, server.server_address[1])
