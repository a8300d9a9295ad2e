"""The benchmark's arithmetic: who runs when, what is kept of the turns, what is held against what, and its models."""

import asyncio
import itertools
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.exceptions import RayError

from jobs.benchmark_phases import phase_start, phase_step, phase_teacher
from jobs.benchmark_phases.bare import environment
from jobs.benchmark_phases.random_models import make_model
from jobs.benchmark_phases.results import FILE, HEAD, TABLE_FILE, BenchmarkResults
from jobs.benchmark_phases.timer import (
    Bench,
    Comparison,
    Done,
    Record,
    Side,
    abba_order,
    check_idle_machine,
    cpu_seconds,
    cpu_since,
    peak_gib,
    summary,
)
from t2g.config import BenchmarkJob, LearnerConfig, PolicyJob, RolloutConfig, ShapeConfig
from t2g.data.prompts import encode_teacher_prompt
from t2g.errors import RunStopped, UserError

SHAPE = {
    "architecture": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def job(folder: Path, **changes: object) -> BenchmarkJob:
    return BenchmarkJob.model_validate({"run": {"root": folder}, "shape": SHAPE, "repeats": 2, **changes})


def sides(**rates: float) -> Record:
    return {
        name: {"seconds": 100 / rate, "spread": 0.1, "cpu_s": 3.0, "peak_gib": 1.5, "amount": 100.0, "rate": rate}
        for name, rate in rates.items()
    }


def test_sides_alternate_in_both_directions() -> None:
    assert abba_order(["a", "b"], 4) == [*"abbaabba"]
    assert abba_order(["a", "b", "c"], 2) == [*"abccba"]


def test_a_summary_is_of_medians_and_half_the_range() -> None:
    rows = [{"seconds": 2.0, "cpu_s": 9.0}, {"seconds": 1.0, "cpu_s": 1.0, "late": 4.0}, {"seconds": 4.0, "cpu_s": 2.0}]
    assert summary(rows[1:]) == {"seconds": 2.5, "cpu_s": 1.5, "late": 4.0, "spread": 0.6}
    assert summary(rows)["seconds"] == 2.0
    assert summary(rows)["spread"] == 0.75


def test_the_first_turn_of_each_side_is_discarded_and_the_rest_is_timed(tmp_path: Path) -> None:
    called: list[str] = []

    def side(name: str, seconds: float) -> object:
        async def run() -> Done:
            called.append(name)
            await asyncio.sleep(10 * seconds if len(called) <= 2 else seconds)
            return Done(amount=6, more={"turn": len(called)})

        return run

    comparison = Comparison(name="r", unit="t", sides={"a": side("a", 0.02), "b": side("b", 0.04)}, reference="a")  # type: ignore[dict-item]
    record = asyncio.run(Bench(job(tmp_path)).measure(comparison))
    assert called == [*"abbaab"]
    a = record["sides"]["a"]
    b = record["sides"]["b"]
    assert a["seconds"] >= 0.02 and b["seconds"] >= 0.04
    assert a["turn"] == 4.5 and b["turn"] == 4.5, "turns 4 and 5, 3 and 6: the slow first ones are not among them"
    mean_rate = 6 / a["seconds"]  # the mean of rates is at least the rate of the mean time
    assert 0.999 * mean_rate <= a["rate"] <= 6 / 0.02


def test_a_side_that_does_not_end_is_named(tmp_path: Path) -> None:
    async def late() -> Done:
        await asyncio.sleep(60)
        return Done(amount=1)

    comparison = Comparison(name="slow comparison", unit="t", sides={"late": late})
    with pytest.raises(RunStopped, match=r"slow comparison, late.*deadline_s=0\.05"):
        asyncio.run(Bench(job(tmp_path, deadline_s=0.05)).measure(comparison))


def test_seconds_of_the_processor_and_memory_are_those_of_the_tree() -> None:
    before = cpu_seconds()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert 0.15 <= cpu_since(before) < 2 and os.getpid() in before
    assert peak_gib() > 0.05


def test_a_later_report_with_less_removes_nothing() -> None:
    before = cpu_seconds()
    assert 0 <= cpu_since(before | {os.getpid(): before[os.getpid()] + 100}) < 2


def test_a_bare_library_has_the_environment_of_what_it_is_compared_with() -> None:
    engine = environment(RolloutConfig(threads=2))
    rank = environment(LearnerConfig(threads=2))
    assert engine["OMP_NUM_THREADS"] == rank["OMP_NUM_THREADS"] == "2"
    assert engine["OMP_WAIT_POLICY"] == "PASSIVE" and int(engine["GOMP_SPINCOUNT"]) > 0
    assert "OMP_WAIT_POLICY" not in rank


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all cores have worked while this process did not."""
    worked = itertools.count(0, 0.1 / 2 * (os.cpu_count() or 1))
    monkeypatch.setattr("jobs.benchmark_phases.timer.SAMPLE_S", 0.1)
    monkeypatch.setattr("jobs.benchmark_phases.timer.machine_seconds", lambda: next(worked))
    monkeypatch.setattr("jobs.benchmark_phases.timer.cpu_since", lambda before: 0.0)
    check_idle_machine(0.51)
    with pytest.raises(UserError, match=r"50% of this machine, and max_busy=0\.49"):
        check_idle_machine(0.49)


def test_results_are_kept_by_phase_and_compared_with_the_reference(tmp_path: Path) -> None:
    benchmark = {
        "name": "rollout",
        "unit": "tokens",
        "reference": "bare",
        "aims": {"fleet": 0.95},
        "sides": sides(bare=50.0, fleet=40.0),
    }
    BenchmarkResults(job(tmp_path)).add("rollout", [benchmark])
    BenchmarkResults(job(tmp_path)).add(
        "learner", [{**benchmark, "name": "learner", "reference": "", "aims": {}, "sides": sides(t2g=7.0)}]
    )
    again = BenchmarkResults(job(tmp_path))
    again.add("rollout", [{**benchmark, "sides": sides(bare=50.0, fleet=45.0)}])
    assert [*again.phases] == ["rollout", "learner"]
    rows = []
    for line in (tmp_path / "run" / TABLE_FILE).read_text().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append(dict(zip(HEAD, cells, strict=True)))
    assert [(row["side"], row["relative rate"], row["aim"]) for row in rows] == [
        ("bare", "–", "–"), ("fleet", "0.900", "0.95"), ("t2g", "–", "–"),
    ]  # fmt: skip
    assert rows[0]["seconds"] == "2.000 ± 10%"
    assert rows[0]["CPU s / 1,000"] == "30"
    with pytest.raises(UserError, match=r"shape\.hidden_size"):
        BenchmarkResults(job(tmp_path, shape={**SHAPE, "hidden_size": 128}))
    assert (tmp_path / "run" / FILE).is_file()


@pytest.mark.parametrize(("mean_length", "probability"), [(None, 0.0), (64.0, 1 / 64)])
def test_models_end_their_responses_at_the_configured_rate(
    tmp_path: Path, mean_length: float | None, probability: float
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(ShapeConfig.model_validate(SHAPE), tmp_path, seed=1, mean_length=mean_length)
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    ids = torch.from_numpy(np.random.default_rng(1).integers(5, 300, (4, 50)))
    with torch.no_grad():
        end_probability = model(ids).logits.float().softmax(-1)[..., end].mean().item()
    assert math.isclose(end_probability, probability, rel_tol=0.15, abs_tol=1e-9)


def test_tied_embeddings_have_no_mean_length(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tie_word_embeddings"):
        make_model(ShapeConfig.model_validate({**SHAPE, "tie_word_embeddings": True}), tmp_path, seed=1, mean_length=64)


@pytest.mark.parametrize("with_trl", [True, False])
def test_the_step_is_compared_with_the_bare_libraries_and_trl_by_alternating_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_trl: bool
) -> None:
    ran: list[str] = []
    known = (phase_step.BARE, "generate", "vllm", "critic", "ahead", "t2g")
    rates = dict(zip(known, (8.0, 2.0, 6.0, 3.0, 5.0, 4.0), strict=True))

    def side(name: str) -> Side:
        async def turn() -> Done:
            ran.append(name)
            return Done(amount=rates[name])

        return turn

    class Ours:
        def __init__(self, bench: Bench, job: PolicyJob) -> None:
            critic = job.objective.advantages == "gae"
            threads = (job.rollout.threads, job.learner.threads)
            assert threads == ((2, 1) if job.rollout.max_staleness else (4, 3)), "who works at once shares the cores"
            self.step = side("critic" if critic else "ahead" if job.rollout.max_staleness else "t2g")

        async def __aenter__(self) -> Side:
            return self.step

        async def __aexit__(self, *error: object) -> None:
            ran.append("closed")

    monkeypatch.setattr(phase_step, "start_loop", Ours)
    monkeypatch.setattr(phase_step, "find_spec", lambda name: name if with_trl else None)
    monkeypatch.setattr(phase_step, "bare_step", lambda bench: side(phase_step.BARE))
    monkeypatch.setattr(phase_step, "trl", lambda bench, vllm: side("vllm" if vllm else "generate"))
    bench = Bench(job(tmp_path, rollout={"threads": 4}, learner={"threads": 3}))
    bench.models = SimpleNamespace(fixed=tmp_path)  # type: ignore[assignment]
    step, *grpo = asyncio.run(phase_step.measure(bench))
    turn = [phase_step.BARE, *(["generate", "vllm"] if with_trl else []), "t2g"]
    tried = ["generate", "vllm"] if with_trl else []
    assert ran == [*tried, *turn, *turn[::-1], *turn, "closed", *["ahead"] * 3, "closed", *["critic"] * 3, "closed"]
    variants = {"t2g, max_staleness=1": 5.0, "t2g, with a value model": 3.0}

    def summarize(comparison: Record) -> tuple[str, str, dict[str, float]]:
        return (
            comparison["name"],
            comparison["reference"],
            {name: measured["amount"] for name, measured in comparison["sides"].items()},
        )

    assert summarize(step) == ("step", phase_step.BARE, {phase_step.BARE: 8.0, "t2g": 4.0, **variants})
    assert step["aims"] == dict.fromkeys(["t2g", "t2g, max_staleness=1"], 1 / 1.15), "a critic is work of its own"
    libraries = {"TRL": 2.0, "TRL with vLLM, weights not sent": 6.0}
    expected = [("GRPO step", "TRL", {**libraries, "t2g": 4.0, **variants})] if with_trl else []
    assert [summarize(comparison) for comparison in grpo] == expected
    assert all([*comparison["aims"].values()] == [1.4, 1.4] for comparison in grpo)


ONE_GPU = {
    "cluster": {"gpu_sharing": "split"},
    "rollout": {"gpus": 0.6, "workers": {"min": 1, "max": 1}},
    "learner": {"gpus": 0.4},
}


def test_on_one_gpu_the_sides_of_a_step_have_it_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop syncs by ipc; no process of another library is alive beside it, and no variant runs if none is asked."""
    alive: list[Side] = []
    ran: list[str] = []

    def make_side(name: str) -> Side:
        class Process:
            def __init__(self) -> None:
                alive.append(name)

            def __del__(self) -> None:
                alive.remove(name)

        process = Process()

        async def turn() -> Done:
            assert alive == ([] if process is None else [name])
            ran.append(name)
            return Done(amount=2.0)

        return turn

    @asynccontextmanager
    async def start_loop(bench: Bench, job: PolicyJob) -> AsyncIterator[Side]:
        assert (job.cluster.gpu_sharing, job.learner.sync_transport) == ("split", "ipc")
        assert alive == [], "engine and rank need the whole GPU"
        yield make_side("t2g")

    monkeypatch.setattr(phase_step, "start_loop", start_loop)
    monkeypatch.setattr(phase_step, "find_spec", lambda name: name)
    monkeypatch.setattr(phase_step, "bare_step", lambda bench: make_side("bare"))
    monkeypatch.setattr(phase_step, "trl", lambda bench, vllm: make_side("vllm" if vllm else "generate"))
    bench = Bench(job(tmp_path, variants=False, **ONE_GPU))
    bench.models = SimpleNamespace(fixed=tmp_path)  # type: ignore[assignment]
    step, grpo = asyncio.run(phase_step.measure(bench))
    assert ran == [*["bare"] * 4, *["generate"] * 4, *["vllm"] * 4, *["t2g"] * 3]  # the first to see whether it works
    assert [*step["sides"]] == [phase_step.BARE, "t2g"]
    assert [*grpo["sides"]] == ["TRL", "TRL with vLLM", "t2g"]


def test_a_benchmark_on_gpus_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs one engine and one rank on each GPU"):
        job(tmp_path, **ONE_GPU | {"learner": {"gpus": 1}})
    whole = {"rollout": {"gpus": 1, "workers": {"min": 1, "max": 1}}, "learner": {"gpus": 1}}
    with pytest.raises(ValueError, match="the benchmark measures none and split"):
        job(tmp_path, cluster={"gpu_sharing": "alternate"}, **whole)


def test_a_step_with_each_use_of_a_teacher_takes_turns_with_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops are open together, each with a log of its own; the step without a teacher is the reference."""
    ran: list[str] = []

    @asynccontextmanager
    async def loop(bench: Bench, job: PolicyJob) -> AsyncIterator[Side]:
        name = f"{job.run.name}, {'no' if job.objective.teacher is None else job.objective.teacher.use}"
        ran.append(f"open {name}")

        async def turn() -> Done:
            ran.append(name)
            return Done(amount=1, more={"rank_gib": 2.0 + (job.objective.teacher is not None)})

        yield turn

    monkeypatch.setattr(phase_teacher, "start_loop", loop)
    bench = Bench(job(tmp_path))
    bench.models = SimpleNamespace(fixed=tmp_path)  # type: ignore[assignment]
    records = asyncio.run(phase_teacher.measure(bench))
    plain = "steps, no"
    expected = []
    for use in ("distill", "scale"):
        name = f"steps-{use}, {use}"
        expected += [f"open {plain}", f"open {name}", plain, name, name, plain, plain, name]
    assert ran == expected
    sides = ("t2g, with a teacher", "t2g, with a teacher that scales")
    for record, side in zip(records, sides, strict=True):
        assert {name: row["rank_gib"] for name, row in record["sides"].items()} == {"t2g": 2.0, side: 3.0}
        assert record["reference"] == "t2g"
    assert len({record["name"] for record in records}) == 2


def test_a_start_is_timed_by_the_lines_that_it_prints() -> None:
    lines = (
        (0.2, "starting Ray ..."), (0.1, "starting Ray: 1 s"), (0.1, "loading and compiling: reward: 1 s"),
        (0.2, "loading: learner: 1 s"), (0.1, "step 1 | KL 0"), (0.3, "writing the policy ..."),
    )  # fmt: skip
    printing = "; ".join(f"time.sleep({seconds}); print({line!r}, flush=True)" for seconds, line in lines)
    more = asyncio.run(phase_start.run_timed([sys.executable, "-c", f"import time; {printing}"])).more
    total = 0.0  # a line may be read late, and the next part is then shorter: only the sums have a lower bound
    for part, least in (("driver_s", 0.2), ("ray_s", 0.3), ("load_s", 0.6), ("step_s", 0.7)):
        total += more[part]
        assert least <= total < least + 5, part
    assert more["first_step_s"] == pytest.approx(total)
    with pytest.raises(RunStopped, match=r"exit code 3: \['no room'\]"):
        asyncio.run(phase_start.run_timed([sys.executable, "-c", "print('no room'); raise SystemExit(3)"]))


def test_a_start_ends_with_its_deadline(tmp_path: Path) -> None:
    late = partial(phase_start.run_timed, ["sh", "-c", "sleep 600"])
    comparison = Comparison(name="start", unit="starts", sides={"t2g": late})
    started = time.monotonic()
    with pytest.raises(RunStopped, match=r"start, t2g: not done within deadline_s=0\.2"):
        asyncio.run(Bench(job(tmp_path, deadline_s=0.2)).measure(comparison))
    assert time.monotonic() - started < 60


def test_the_critique_of_the_benchmark_has_a_token_for_each_letter(tmp_path: Path) -> None:
    bench = Bench(job(tmp_path, shape={**SHAPE, "vocab_size": 512}))
    feedback = asyncio.run(phase_step.Counted().judge(bench.models.prompts[0], "aab"))
    ids = [
        encode_teacher_prompt(phase_step.BareTask(), bench.models.prompts[0], critique, bench.models.tokenizer, 256)
        for critique in ("", feedback.critique)
    ]
    assert len(ids[1]) - len(ids[0]) == 64


def test_a_library_that_cannot_make_a_step_has_no_side_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    async def works() -> Done:
        return Done(amount=1)

    async def dies() -> Done:
        raise RayError("its engine ended")

    async def hangs() -> Done:
        await asyncio.sleep(60)
        raise AssertionError

    sides = asyncio.run(phase_step.select_working({"one": works, "two": dies, "three": hangs}, 0.05))
    output = capsys.readouterr().out
    assert [*sides] == ["one"]
    assert sides["one"] is works
    assert "two has no side: RayError: its engine ended" in output and "three has no side: TimeoutError" in output
