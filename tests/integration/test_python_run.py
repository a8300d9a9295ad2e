"""The example of the guide on the real stack, as a cell of a notebook: in a running event loop, here of a thread."""

import subprocess
import sys
from pathlib import Path

import pytest
from models import random_model
from own_runs import ROOT, read_example, start

DEADLINE_S = 600
# A process of its own: Ray keeps the authentication mode of the first cluster for the life of a process.
NOTEBOOK = """
import asyncio, signal, threading
from pathlib import Path

import ray

from jobs.api import train
from t2g.errors import UserError

EXAMPLE = Path("first_run.py")
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
raised = []

async def cell():
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), globals())

def notebook():
    try:
        asyncio.run(cell())
    except BaseException as error:  # a job that ends the process would raise SystemExit
        raised.append(error)

thread = threading.Thread(target=notebook)
thread.start()
thread.join()
assert not raised, raised
assert not ray.is_initialized()
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers

assert run.folder == Path("runs/run").resolve() and "</html>" in run.report.read_text()
assert [line["step"] for line in run.metrics] == [1, 2, 3] and run.metrics[-1]["samples"] == 3 * 4 * 4
assert all(line["tokens/neutral_share"] < 1 and line["feedback/source/program"] == 1 for line in run.metrics)
assert {sample["feedback"]["critique"] for sample in run.samples} == {"Sixty characters are enough."}
assert (run.policy / "model.safetensors").exists()

again = train(config, prompts=prompts, feedback=judge)
assert again == run, "from the main thread without a loop: all steps are done"
try:
    train(config, prompts=prompts[:2], feedback=judge)
except UserError as error:
    assert "other inputs: the content of data.path" in str(error), error
    print("all held")
"""


@pytest.mark.slow  # a whole run; tests/jobs/test_python_api.py has the calls, and the example up to its start
def test_the_example_of_the_guide_runs_in_the_event_loop_of_a_thread(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    (tmp_path / "first_run.py").write_text(read_example(model))
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    log = tmp_path / "notebook.log"
    process = start([sys.executable, "notebook.py"], log, cwd=tmp_path, PYTHONPATH=str(ROOT))
    try:
        assert process.wait(DEADLINE_S) == 0, log.read_text()
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    assert log.read_text().splitlines()[-1] == "all held"
