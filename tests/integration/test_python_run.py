"""The example of the guide on the real stack, as a cell of a notebook: in a running event loop, here of a thread."""

import asyncio
import re
import signal
import threading
from pathlib import Path
from types import ModuleType

import pytest
import ray
from models import random_model

from jobs.api import PolicyRun, train
from t2g.errors import UserError

GUIDE = Path(__file__).parents[2] / "t2g" / "guides" / "12-python.md"
DEADLINE_S = 600


def test_the_example_of_the_guide_runs_in_the_event_loop_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model = random_model(tmp_path / "model")
    (example,) = re.findall(r"^```python\n(# first_run\.py\n.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len([line for line in example.splitlines()[1:] if line]) <= 10
    file, main = tmp_path / "first_run.py", ModuleType("__main__")
    file.write_text(example.replace("FOLDER", str(model)))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    raised: list[BaseException] = []

    async def cell() -> None:
        exec(compile(file.read_text(), str(file), "exec"), main.__dict__)  # noqa: S102

    def notebook() -> None:
        try:
            asyncio.run(cell())
        except BaseException as error:  # noqa: BLE001 a job that ends the process would raise SystemExit
            raised.append(error)

    thread = threading.Thread(target=notebook)
    thread.start()
    thread.join(DEADLINE_S)
    assert not raised and not thread.is_alive() and not ray.is_initialized()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers

    run: PolicyRun = main.__dict__["run"]
    assert run.folder == tmp_path / "runs" / "run" and "</html>" in run.report.read_text()
    assert [line["step"] for line in run.metrics] == [1, 2, 3] and run.metrics[-1]["samples"] == 3 * 4 * 4
    assert all(line["tokens/neutral_share"] < 1 and line["feedback/source/program"] == 1 for line in run.metrics)
    assert {sample["feedback"]["critique"] for sample in run.samples} == {"Sixty characters are enough."}
    assert (run.policy / "model.safetensors").exists()

    again = train(main.__dict__["config"], prompts=main.__dict__["prompts"], feedback=main.__dict__["judge"])
    assert again == run, "from the main thread without a loop: all steps are done"
    with pytest.raises(UserError, match=r"other inputs: the content of data\.path"):
        train(main.__dict__["config"], prompts=main.__dict__["prompts"][:2], feedback=main.__dict__["judge"])
