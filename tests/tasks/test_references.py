"""`sandbox.tests=auto`: the reference solution of a record decides how its tests run."""

from pathlib import Path

import pytest

from t2g.config import StyleConfig
from t2g.errors import UserError
from t2g.sandbox import Refused, SandboxConfig
from t2g.tasks import code
from t2g.tasks.base import get_task
from t2g.tasks.references import check_references
from t2g.types import Prompt

TASK = get_task("code")
LIMITS = SandboxConfig(timeout_s=20)
HEAD = "from solution import f\nfrom unittest.mock import patch\n"
PRINTED = "def f():\n    print('hello')\n"
RECORDS = {
    "plain": ("def f():\n    return 1\n", f"{HEAD}def test():\n    assert f() == 1\n"),
    "patched": (
        PRINTED,
        f"{HEAD}def test():\n    with patch('builtins.print') as p:\n        f()\n    assert p.called\n",
    ),
    "wrong": ("def f():\n    return 1\n", f"{HEAD}def test():\n    assert f() == 2\n"),
}


def prompt(name: str, **more: str) -> Prompt:
    code, tests = RECORDS[name]
    return Prompt(prompt_id=name, prompt_text="p", task="code", payload={"solution": code, "test": tests, **more})


def test_the_reference_decides_the_mode_and_a_wrong_one_is_left_out(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    bare = Prompt(prompt_id="bare", prompt_text="p", task="code", payload={"test": "def test():\n    pass\n"})
    checked = check_references([*map(prompt, RECORDS), bare], TASK, LIMITS, tmp_path)
    assert {p.prompt_id: p.payload.get("tests_mode") for p in checked} == {
        "plain": "separate", "patched": "together", "bare": None,
    }  # fmt: skip
    assert "1 of 4 reference solutions do not pass their tests" in caplog.text and "record wrong" in caplog.text
    judge = TASK.make_feedback_function(style=StyleConfig(), sandbox=LIMITS)
    outcome = judge("p", PRINTED, payload=checked[1].payload)["execution"]
    assert (outcome["passed"], outcome["mode"]) == (True, "together")
    assert TASK.measure(checked[1], PRINTED, sandbox=LIMITS) == {"passed": 1.0, "unsupported": 0.0}
    assert judge("p", RECORDS["plain"][0], payload=checked[0].payload)["execution"]["mode"] == "separate"


def test_nothing_left_is_an_error_and_other_modes_ask_no_reference(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is left; the first is record wrong"):
        check_references([prompt("wrong")], TASK, LIMITS, tmp_path)
    assert [
        p.payload["tests_mode"] for p in check_references([prompt("wrong")], TASK, LIMITS, tmp_path, leave_out=False)
    ] == ["neither"]
    separate = LIMITS.model_copy(update={"tests": "separate"})
    assert "tests_mode" not in check_references([prompt("wrong")], TASK, separate, tmp_path)[0].payload
    planted = get_task("tiny_code")  # its references have faults on purpose
    assert "tests_mode" not in check_references([prompt("wrong")], planted, LIMITS, tmp_path)[0].payload


def test_a_machine_that_cannot_isolate_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise Refused("network cannot be isolated")

    monkeypatch.setattr(code, "choose_mode", refuse)
    monkeypatch.setattr(code, "run_solution", refuse)
    with pytest.raises(UserError, match="network cannot be isolated"):
        check_references([prompt("plain")], TASK, LIMITS, tmp_path)
    with pytest.raises(UserError, match="network cannot be isolated"):
        TASK.measure(prompt("plain"), "x = 1", sandbox=LIMITS)


def test_a_record_that_names_a_mode_cannot_overrule_the_config() -> None:
    separate = LIMITS.model_copy(update={"tests": "separate"})
    judged = TASK.make_feedback_function(style=StyleConfig(), sandbox=separate)(
        "p", PRINTED, payload=prompt("patched", tests_mode="together").payload
    )
    assert judged["execution"]["mode"] == "separate"
    assert not judged["execution"]["passed"]


def test_a_record_without_a_solution_cannot_choose_its_mode(tmp_path: Path) -> None:
    payload = {"test": RECORDS["patched"][1], "tests_mode": "together"}
    bare = Prompt(prompt_id="bare", prompt_text="p", task="code", payload=payload)
    (checked,) = check_references([bare], TASK, LIMITS, tmp_path)
    assert checked.payload == {"test": RECORDS["patched"][1]}


def test_a_resume_takes_the_modes_of_the_first_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = [prompt("plain"), prompt("patched")]
    first = [p.payload for p in check_references(records, TASK, LIMITS, tmp_path)]
    ran: list[str] = []

    def time_out(prompt: Prompt, **_: object) -> str:
        ran.append(prompt.prompt_id)
        return "neither"

    monkeypatch.setattr(TASK, "reference_mode", time_out)
    assert [p.payload for p in check_references(records, TASK, LIMITS, tmp_path)] == first
    assert ran == []
    changed = [prompt("plain"), prompt("patched", imports="import os")]
    assert [p.prompt_id for p in check_references(changed, TASK, LIMITS, tmp_path)] == ["plain"]
    assert ran == ["patched"], "a changed record is run again"
