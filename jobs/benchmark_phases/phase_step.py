"""A whole step of the loop, real engines, ranks and sync, next to bare vLLM and plain torch in turn, and
next to TRL's GRPO: one optimizer step on the same number of tokens."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from ray.exceptions import RayError

from actors.cluster.fanout import first_line
from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from actors.weights.sync import FleetWeightSync
from jobs.benchmark_phases.bare import BareEngine, BareLearner, begin
from jobs.benchmark_phases.bare_trl import Grpo
from jobs.benchmark_phases.timer import Bench, Comparison, Done, Record, Side
from jobs.common.fleets import Fleets, start_learner
from jobs.train_policy.policy_training import make_learner_spec
from t2g.concurrency import cancel_all, run_with_background
from t2g.config import BenchmarkJob, PolicyJob, with_overrides
from t2g.feedback.parse import make_feedback
from t2g.interfaces import FeedbackSource
from t2g.loop.trainer import Trainer
from t2g.metrics import GENERATE_S, LEARN_S, PEAK_MEMORY, SYNC_S
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity
from t2g.runs.log import RunLog
from t2g.tasks.prompts_only import PromptsTask
from t2g.text.tokenizer import Message
from t2g.types import Prompt, SpanFeedback, TrainSample

AIM = 1 / 1.15  # share of the rate of the bare libraries
AIM_TRL = 1.4
PARTS = {
    "generate_s": GENERATE_S, "learn_s": LEARN_S, "sync_s": SYNC_S,
    "rank_gib": PEAK_MEMORY,
}  # fmt: skip
CRITIQUE = "B" * 64  # as many tokens: the tokenizer joins no capital letters
MOST_STEPS = 10_000
UNIT = "response tokens"
OURS = "t2g"
AHEAD = "t2g, max_staleness=1"
CRITIC = "t2g, with a value model"
BARE = "bare vLLM, then plain torch"
EQUAL = (OURS, AHEAD)  # a critic is work that the others have not


async def measure(bench: Bench) -> list[Record]:
    """Compare the same step with TRL, if it is installed, and the bare libraries; then the variants separately.

    A variant that samples ahead would do so during the other sides.
    """
    sends = "" if bench.config.learner.gpus else ", weights not sent"
    names = {"TRL": False, f"TRL with vLLM{sends}": True} if find_spec("trl") else {}
    makers = {name: partial(trl, bench, vllm=vllm) for name, vllm in names.items()}
    if bench.config.cluster.gpu_sharing == "none":
        candidates = {name: make() for name, make in makers.items()}
        libraries = await select_working(candidates, bench.config.deadline_s)
        async with start_loop(bench, loop_job(bench)) as step:
            sides = {BARE: bare_step(bench), **libraries, OURS: step}
            record = await bench.measure(Comparison(name="step", unit=UNIT, sides=sides))
    else:
        record = await measure_alone(bench, {BARE: partial(bare_step, bench), **makers})
        libraries = record["sides"].keys() - {BARE, OURS}
    measured = record["sides"]
    if bench.config.variants:
        measured |= await measure_variants(bench)

    def compare(name: str, reference: str, aim: float, left_out: Collection[str]) -> Record:
        sides = {side: row for side, row in measured.items() if side not in left_out}
        aims = dict.fromkeys(EQUAL, aim)
        return {**record, "name": name, "reference": reference, "aims": aims, "sides": sides}

    records = [compare("step", BARE, AIM, libraries)]
    if libraries:
        records.append(compare("GRPO step", "TRL", AIM_TRL, [BARE]))
    return records


async def measure_variants(bench: Bench) -> Record:
    """Return the variants of our side, each measured alone."""
    sides: Record = {}
    for name, changes in variants(bench.config).items():
        async with start_loop(bench, loop_job(bench, changes)) as step:
            record = await bench.measure(Comparison(name="step", unit=UNIT, sides={name: step}))
            sides |= record["sides"]
    return sides


async def measure_alone(bench: Bench, makers: Mapping[str, Callable[[], Side]]) -> Record:
    """Measure the sides one after the other: engine and rank of one side take a whole GPU.

    Args:
        makers: Make the sides of other libraries; their processes end with the side.
    """
    measured: dict[str, Any] = {}
    for name, make in makers.items():
        sides = await select_working({name: make()}, bench.config.deadline_s)
        if sides:
            record = await bench.measure(Comparison(name="step", unit=UNIT, sides=sides))
            measured |= record["sides"]
        del sides
        gc.collect()  # ends the actors of the side
    async with start_loop(bench, loop_job(bench)) as step:
        record = await bench.measure(Comparison(name="step", unit=UNIT, sides={OURS: step}))
    return {**record, "sides": measured | record["sides"]}


async def select_working(sides: Mapping[str, Side], deadline_s: float) -> dict[str, Side]:
    """Return the sides that can make a step; print the reason for each of the others."""
    working: dict[str, Side] = {}
    for name, side in sides.items():
        try:
            await asyncio.wait_for(side(), deadline_s)
            working[name] = side
        except (RayError, TimeoutError) as error:
            print(f"  {name} has no side: {first_line(error)}", flush=True)
    return working


def variants(config: BenchmarkJob) -> dict[str, dict[str, Any]]:
    """Return the changes of the config by variant; engines and ranks that work at one time share the cores."""
    shared = {
        "rollout.threads": max(1, config.rollout.threads // 2),
        "learner.threads": max(1, config.learner.threads // 2),
    }
    return {
        AHEAD: {"rollout.max_staleness": 1, **shared},
        CRITIC: {"objective.advantages": "gae"},
    }


def trl(bench: Bench, *, vllm: bool) -> Side:
    """Return TRL's side: the same model, prompts, samples, forward passes, beta, dtype and threads.

    Policy and reference run once each. TRL samples by `generate`, or with `vllm` by vLLM in our engine's environment.
    """
    config = bench.config
    texts = [prompt.prompt_text for prompt in bench.models.prompts]
    role = config.rollout if vllm else config.learner
    actor = begin(Grpo, role, str(bench.models.fixed), texts, config, vllm=vllm)

    async def side() -> Done:
        tokens, more = await actor.step.remote(config.deadline_s)
        return Done(amount=tokens, more=more)

    return side


def bare_step(bench: Bench) -> Side:
    """Sample a step with bare vLLM, then update with plain torch."""
    config = bench.config
    rollout = config.rollout
    model = str(bench.models.fixed)
    engine = begin(BareEngine, rollout, model, rollout, config.run.seed)
    learner = begin(BareLearner, config.learner, model, config.learner)
    ids: list[np.ndarray] = []
    for prompt in bench.models.prompts[: rollout.prompts_per_step]:
        ids += [prompt.prompt_ids] * rollout.samples_per_prompt
    samples = random_samples(bench)

    async def side() -> Done:
        loop = asyncio.get_running_loop()
        started = loop.time()
        tokens = await engine.generate.remote(ids, logprobs=0, max_tokens=rollout.max_new_tokens, temperature=1.0)
        sampled = loop.time()
        await learner.step.remote(samples)
        learned = loop.time()
        return Done(amount=tokens, more={"generate_s": sampled - started, "learn_s": learned - sampled})

    return side


def random_samples(bench: Bench, *, exponential: bool = False) -> list[TrainSample]:
    """Return the samples of a step, with responses of max_new_tokens or of exponential length with half as mean."""
    rollout = bench.config.rollout
    rng = np.random.default_rng(bench.config.run.seed)
    number = rollout.prompts_per_step * rollout.samples_per_prompt
    most = rollout.max_new_tokens
    lengths = [most] * number
    if exponential:
        drawn = np.clip(rng.exponential(most / 2, number), 1, most)
        lengths = drawn.astype(int).tolist()
    weight = 1 / sum(lengths)
    prompt_ids = bench.models.prompts[0].prompt_ids
    return [random_sample(prompt_ids, length, weight, rng) for length in lengths]


def random_sample(prompt_ids: np.ndarray, length: int, weight: float, rng: np.random.Generator) -> TrainSample:
    response_ids = rng.integers(5, 300, length).astype(np.int32)
    advantages = rng.normal(size=length).astype(np.float32)
    column = partial(np.zeros, length, np.float32)
    return TrainSample(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        weights=np.full(length, weight, np.float32),
        advantages=advantages,
        returns=column(), values=column(), old_logprobs=column(), rollout_logprobs=column(), ref_logprobs=column(),
    )  # fmt: skip


def loop_job(bench: Bench, changes: Mapping[str, Any] | None = None) -> PolicyJob:
    """Return a policy job on the benchmark's models, with these values of dotted keys."""
    config = bench.config
    run = {"root": config.run.folder, "name": "steps", "seed": config.run.seed}
    model = {"policy": str(bench.models.fixed)}
    values = {
        "run": run,
        "model": model,
        "cluster": config.cluster,
        "data": {"path": "none"},
        "num_steps": MOST_STEPS,
        "feedback": {"source": "pkg:judge"},
        "rollout": config.rollout,
        "learner": config.learner,
        "checkpoint": {"every": MOST_STEPS},
    }
    job = PolicyJob.model_validate(values)
    return with_overrides(job, changes or {})


class Counted(FeedbackSource):
    """A feedback source without cost that praises each "a", like TRL's reward function here."""

    name = "program"

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        num_praised = min(8, response_text.count("a"))
        places = [("a", occurrence) for occurrence in range(1, num_praised + 1)]
        return make_feedback(CRITIQUE, places, [], response_text, source=self.name, version="")


class BareTask(PromptsTask):
    """A task whose teacher reads a prompt and a critique, and no instructions, which would be longer than both."""

    def teacher_messages(self, prompt: Prompt, critique: str) -> list[Message]:
        return [{"role": "user", "content": prompt.prompt_text + critique}]


def make_trainer(
    bench: Bench,
    job: PolicyJob,
    fleet: RolloutFleet,
    learner: LearnerGroup,
    log: RunLog,
    at_end: Callable[[], Awaitable[dict[str, float]]],
) -> Trainer:
    """Return a trainer on real parts, whose feedback costs nothing. at_end: awaited at the end of each step."""
    prompts = bench.models.prompts
    probe = [prompt.prompt_ids for prompt in prompts]
    sync = FleetWeightSync(learner, fleet, job.learner, prompts=probe)
    checkpoints = CheckpointStore(job.run.folder / "checkpoints", 1)
    return Trainer(
        config=job,
        task=BareTask(),
        tokenizer=bench.models.tokenizer,
        prompts=prompts,
        eval_prompts=(),
        rollouts=fleet,
        feedback=Counted(),
        learner=learner,
        sync=sync,
        log=log,
        checkpoints=checkpoints,
        identity=Identity.from_config(job),
        stop=lambda: False,
        extra_metrics=at_end,
    )


@asynccontextmanager
async def start_loop(bench: Bench, job: PolicyJob) -> AsyncIterator[Side]:
    """Yield the side that is one step of the trainer on real parts; the trainer waits at the end of each step."""
    may_go_on = asyncio.Semaphore(0)
    has_ended = asyncio.Semaphore(0)
    last_metrics: dict[str, float] = {}

    async def wait_for_turn() -> dict[str, float]:
        has_ended.release()
        await may_go_on.acquire()
        return {}

    async def run() -> None:
        await may_go_on.acquire()
        await run_with_background(trainer.run(), fleet.supervise())

    async def step() -> Done:
        """Run one step, of responses with max_new_tokens; the parts of the time are those of the step before."""
        may_go_on.release()
        ending = asyncio.ensure_future(has_ended.acquire())
        await asyncio.wait([ending, running], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        more = {name: last_metrics[metric] for name, metric in PARTS.items() if metric in last_metrics}
        return Done(amount=num_tokens, more=more)

    rollout = job.rollout
    num_tokens = rollout.prompts_per_step * rollout.samples_per_prompt * rollout.max_new_tokens
    spec = make_learner_spec(job)
    log = RunLog(job.run.folder, job.log)
    with Fleets() as fleets:
        fleet = fleets.rollouts(job.model, rollout, job)
        with start_learner(spec, placement_timeout_s=job.cluster.placement_timeout_s) as learner:
            trainer = make_trainer(bench, job, fleet, learner, log, wait_for_turn)
            trainer.on_step = lambda _, metrics: last_metrics.update(metrics)
            log.truncate(0)
            running = asyncio.ensure_future(run())
            try:
                yield step
            finally:
                await cancel_all([running])
