"""The driver is killed at random moments and started again by the same command, on the real stack."""

import json
import os
import random
import re
import shutil
import string
import time
from pathlib import Path

import psutil
import pytest
from models import bigram_model
from own_runs import command, logged_steps, make_folder, start

SEED = 20250522
KILLS = 3
NUM_STEPS = 8
DEADLINE_S = 600
MARK = "T2G_TEST_RUN"  # in the environment of everything that a driver starts
COMPARED = ("policy/", "critic/", "reward/", "tokens/", "response/", "feedback/", "importance/", "gap/", "eval/")
TOLERANCE = 1e-6

FUNCTION = """
import os

from t2g.environments import Reply

class Again:
    async def reply(self, prompt, messages):
        return Reply("Again.")

def judge(prompt, response):
    with open(os.environ["JUDGED"], "a") as file:
        file.write(repr((prompt, response)) + chr(10))
    first_turn = response.partition("[user]")[0]  # a quote from a reply of the environment would pay nothing
    letters = [c for c in first_turn if c.isascii() and c.isalpha()]
    good = [c for c in letters if c.lower() in "aeiou"]
    return "vowels are good", good[:2], [c for c in letters if c not in good][:2]
"""

CONVERSATIONS = {
    "environment": "vowels:Again",
    "rollout.max_turns": 2,
    "rollout.max_model_len": 192,
    "learner.policy.lr": 1e-5,  # faster the policy of letters ends each turn at once
}
ENDING = dict.fromkeys(string.ascii_letters, "<|end|>")  # after a letter a turn ends


def marked(mark: str) -> list[int]:
    """Processes that a driver of this test, or what it started, has started."""
    pids = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def wait_for(condition: object, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow  # five starts of a whole run; tests/test_restarts.py has the same on fakes
@pytest.mark.parametrize("changes", [{}, CONVERSATIONS, {**CONVERSATIONS, "rollout.max_staleness": 1}])
def test_a_run_killed_three_times_has_the_numbers_of_one_that_was_not(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    """With staleness the weights that sampled a token depend on the clock: there the records are compared alone."""
    folder = make_folder(tmp_path)
    log = tmp_path / "log.txt"
    if changes:
        bigram_model(folder / "policy", ENDING)
    (folder / "vowels.py").write_text(FUNCTION)
    mark = f"{os.getpid()}-{tmp_path.name}"
    environ = {MARK: mark, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}

    def run(name: str) -> list[str]:
        return command(
            folder,
            **{
                "run.name": name,
                "feedback.source": "vowels:judge",
                "num_steps": NUM_STEPS,
                "checkpoint.every": 2,
                "learner.policy.lr": 0.001,
                "learner.critic.lr": 0.001,
                "eval_data": f"{{path: {folder / 'prompts.jsonl'}, limit: 4}}",
                "eval.every": 3,
                **changes,
            },
        )

    environ["JUDGED"] = str(folder / "whole.txt")
    assert start(run("whole"), log, **environ).wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    whole = lines(folder / "runs" / "whole")
    environ["JUDGED"] = str(folder / "killed.txt")

    rng = random.Random(SEED)
    for kill in range(KILLS):
        process = start(run("killed"), log, **environ)
        last = kill * 2 + rng.randint(0, 1)
        wait_for(lambda p=process, s=last: p.poll() is not None or s in logged_steps(folder / "runs" / "killed"), log)
        time.sleep(rng.random() * 0.7)
        assert process.poll() is None, log.read_text()[-4000:]
        process.kill()
        process.wait(timeout=DEADLINE_S)
        wait_for(lambda: not marked(mark), log)
    assert start(run("killed"), log, **environ).wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    wait_for(lambda: not marked(mark), log)

    killed = lines(folder / "runs" / "killed")
    assert [line["step"] for line in killed] == [line["step"] for line in whole] == list(range(NUM_STEPS + 1))
    assert "going on after" in log.read_text()
    if changes:
        assert all(1 < line["turns/mean"] <= 2 for run in (whole, killed) for line in run[1:])
        records = [json.loads(line) for line in (folder / "runs" / "killed" / "samples.jsonl").open()]
        keys = [(r["step"], r["split"], r["prompt_id"], r["sample_index"]) for r in records]
        assert len(set(keys)) == len(keys), "each conversation once"
    if "rollout.max_staleness" in changes:
        assert {line["staleness/max"] for line in killed[1:]} == {0, 1}
        return
    for a, b in zip(whole, killed, strict=True):
        names = [name for name in a if name.startswith(COMPARED)]
        assert {name: b[name] for name in names} == pytest.approx(
            {name: a[name] for name in names}, abs=TOLERANCE, rel=TOLERANCE
        ), f"step {a['step']}"
    num_judged, num_after_kills = (
        len((folder / name).read_text().splitlines()) for name in ("whole.txt", "killed.txt")
    )
    assert num_judged == NUM_STEPS * 8 + 4 * 4, "two responses to four prompts a step, and four evaluations of four"
    assert num_after_kills <= num_judged + KILLS, "a judgement at the moment of a kill is made again, and no other"
    rewards = [line["reward/token_mean"] for line in whole[1:]]
    losses = [line["policy/loss"] for line in whole[1:]]
    assert len(set(rewards)) > NUM_STEPS / 2
    assert len(set(losses)) > NUM_STEPS / 2
    assert any(line["policy/kl"] > 1e-3 for line in whole[1:])  # the policy moved


@pytest.mark.slow  # two whole runs; tests/runs/test_mirror.py has the same on fakes
def test_a_run_that_loses_its_disk_after_step_7_goes_on_from_its_mirror(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    log = tmp_path / "log.txt"
    (folder / "vowels.py").write_text(FUNCTION)
    mark = f"{os.getpid()}-{tmp_path.name}"
    environ = {MARK: mark, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    environ["JUDGED"] = str(folder / "judged.txt")

    def run(name: str, **changes: object) -> list[str]:
        rates = {"learner.policy.lr": 0.001, "learner.critic.lr": 0.001, "rollout.start_timeout_s": 600}
        source = {"feedback.source": "vowels:judge", "num_steps": 12, "checkpoint.every": 2}
        return command(folder, **{"run.name": name, **source, **rates, **changes})

    assert start(run("whole"), log, **environ).wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    whole = lines(folder / "runs" / "whole")

    mirror = tmp_path / "mirror"
    killed_run = folder / "runs" / "killed"
    arguments = run("killed", **{"run.mirror": f"file://{mirror}"})
    process = start(arguments, log, **environ)
    manifest = mirror / "killed" / "manifest.json"
    wait_for(lambda: process.poll() is not None or 7 in logged_steps(killed_run), log)
    wait_for(lambda: process.poll() is not None or "checkpoints/step-" in manifest.read_text(), log)
    assert process.poll() is None, log.read_text()[-4000:]
    process.kill()
    process.wait(timeout=DEADLINE_S)
    wait_for(lambda: not marked(mark), log)
    mirrored = re.findall(r"checkpoints/step-0*(\d+)/", manifest.read_text())
    last_step = max(map(int, mirrored))
    shutil.rmtree(killed_run)

    assert start(arguments, log, **environ).wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    wait_for(lambda: not marked(mark), log)
    assert re.search(rf"restoring .*/killed: [\s\S]*going on after {last_step} of 12", log.read_text())
    killed = lines(killed_run)
    assert [line["step"] for line in killed] == [line["step"] for line in whole]
    for a, b in zip(whole, killed, strict=True):
        names = [name for name in a if name.startswith(COMPARED)]
        expected = {name: a[name] for name in names}
        assert {name: b[name] for name in names} == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
    assert (mirror / "killed" / "report.html").read_bytes() == (killed_run / "report.html").read_bytes()
