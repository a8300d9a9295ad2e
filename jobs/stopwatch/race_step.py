"""A whole step of the loop, real engines, ranks and sync, next to bare vLLM and plain torch in turn, and
next to TRL's GRPO: one optimizer step on the same number of tokens."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from ray.exceptions import RayError

from actors.cluster.fanout import first_line
from actors.weights.sync import WeightSync
from jobs.common.fleets import Fleets, loaded_learner
from jobs.common.policy_runs import learner_spec
from jobs.stopwatch.bare import BareEngine, BareLearner, begin
from jobs.stopwatch.bare_trl import Grpo
from jobs.stopwatch.watch import Bench, Done, Race, Record, Side
from t2g.concurrency import cancel_all, run_with_background
from t2g.config import BenchmarkJob, PolicyJob, with_overrides
from t2g.feedback.parse import make_feedback
from t2g.interfaces import FeedbackSource
from t2g.loop.trainer import Trainer
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity
from t2g.runs.log import RunLog
from t2g.tasks.prompts_only import PromptsTask
from t2g.text.tokenizer import Message
from t2g.types import Prompt, SpanFeedback, TrainSample

AIM = 1 / 1.15  # of the rate of the bare libraries
AIM_TRL = 1.4
PARTS = {
    "generate_s": "time/generate_s", "learn_s": "time/learn_s", "sync_s": "time/sync_s",
    "rank_gib": "learner/peak_memory_gib",
}  # fmt: skip
CRITIQUE = "B" * 64  # as many tokens: the tokenizer joins no capital letters
MOST_STEPS = 10_000
UNIT = "response tokens"
OURS, AHEAD, CRITIC = "t2g", "t2g, max_staleness=1", "t2g, with a value model"
BARE = "bare vLLM, then plain torch"
EQUAL = OURS, AHEAD  # a critic is work that the others have not


async def measure(bench: Bench) -> list[Record]:
    """Race the same step against TRL, if it is installed, and the bare libraries; then the variants separately.

    A variant that samples ahead would do so during the other sides.
    """
    sends = "" if bench.config.learner.gpus else ", weights not sent"
    names = {"TRL": False, f"TRL with vLLM{sends}": True} if find_spec("trl") else {}
    makers = {name: partial(trl, bench, vllm=vllm) for name, vllm in names.items()}
    if bench.config.cluster.gpu_sharing == "none":
        rivals = await able({name: make() for name, make in makers.items()}, bench.config.deadline_s)
        async with running_loop(bench, loop_job(bench)) as step:
            sides = {BARE: bare_step(bench), **rivals, OURS: step}
            found = await bench.race(Race(name="step", unit=UNIT, sides=sides))
    else:
        found = await measure_alone(bench, {BARE: partial(bare_step, bench), **makers})
        rivals = found["sides"].keys() - {BARE, OURS}
    measured = found["sides"]
    for name, changes in variants(bench.config).items() if bench.config.variants else ():
        async with running_loop(bench, loop_job(bench, changes)) as step:
            measured |= (await bench.race(Race(name="step", unit=UNIT, sides={name: step})))["sides"]

    def compare(name: str, reference: str, aim: float, left_out: Collection[str]) -> Record:
        kept = {side: row for side, row in measured.items() if side not in left_out}
        return {**found, "name": name, "reference": reference, "aims": dict.fromkeys(EQUAL, aim), "sides": kept}

    records = [compare("step", BARE, AIM, rivals)]
    return [*records, compare("GRPO step", "TRL", AIM_TRL, [BARE])] if rivals else records


async def measure_alone(bench: Bench, makers: Mapping[str, Callable[[], Side]]) -> Record:
    """Measure the sides one after the other: engine and rank of one side take a whole GPU.

    Args:
        makers: Make the sides of other libraries; their processes end with the side.
    """
    measured: dict[str, Any] = {}
    for name, make in makers.items():
        sides = await able({name: make()}, bench.config.deadline_s)
        if sides:
            measured |= (await bench.race(Race(name="step", unit=UNIT, sides=sides)))["sides"]
        del sides
        gc.collect()  # ends the actors of the side
    async with running_loop(bench, loop_job(bench)) as step:
        found = await bench.race(Race(name="step", unit=UNIT, sides={OURS: step}))
    return {**found, "sides": measured | found["sides"]}


async def able(rivals: Mapping[str, Side], deadline_s: float) -> dict[str, Side]:
    """Return the sides that can make a step; print the reason for each of the others."""
    found = {}
    for name, side in rivals.items():
        try:
            await asyncio.wait_for(side(), deadline_s)
            found[name] = side
        except (RayError, TimeoutError) as error:
            print(f"  {name} has no side: {first_line(error)}", flush=True)
    return found


def variants(config: BenchmarkJob) -> dict[str, dict[str, Any]]:
    """Return the config in which concurrent engines and ranks share the cores, as with `threads=auto`."""
    shared = {f"{role}.threads": max(1, getattr(config, role).threads // 2) for role in ("rollout", "learner")}
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
    config, prompts = bench.config, bench.models.prompts
    engine = begin(BareEngine, config.rollout, str(bench.models.fixed), config.rollout, config.run.seed)
    learner = begin(BareLearner, config.learner, str(bench.models.fixed), config.learner)
    repeated = [p for p in prompts[: config.rollout.prompts_per_step] for _ in range(config.rollout.samples_per_prompt)]
    samples = random_samples(bench)

    async def side() -> Done:
        loop = asyncio.get_running_loop()
        started = loop.time()
        tokens = await engine.generate.remote(
            [p.prompt_ids for p in repeated], logprobs=0, max_tokens=config.rollout.max_new_tokens, temperature=1.0
        )
        sampled = loop.time()
        await learner.step.remote(samples)
        return Done(amount=tokens, more={"generate_s": sampled - started, "learn_s": loop.time() - sampled})

    return side


def random_samples(bench: Bench, *, exponential: bool = False) -> list[TrainSample]:
    """Return the samples of a step, with responses of max_new_tokens or of exponential length with half as mean."""
    rollout, rng = bench.config.rollout, np.random.default_rng(bench.config.run.seed)
    number, most = rollout.prompts_per_step * rollout.samples_per_prompt, rollout.max_new_tokens
    drawn = np.clip(rng.exponential(most / 2, number), 1, most).astype(int) if exponential else [most] * number
    return [random_sample(bench, int(length), 1 / sum(drawn), rng) for length in drawn]


def random_sample(bench: Bench, length: int, weight: float, rng: np.random.Generator) -> TrainSample:
    column = partial(np.zeros, length, np.float32)
    return TrainSample(
        prompt_ids=bench.models.prompts[0].prompt_ids,
        response_ids=rng.integers(5, 300, length).astype(np.int32),
        weights=np.full(length, weight, np.float32),
        advantages=rng.normal(size=length).astype(np.float32),
        returns=column(), values=column(), old_logprobs=column(), rollout_logprobs=column(), ref_logprobs=column(),
    )  # fmt: skip


def loop_job(bench: Bench, changes: Mapping[str, Any] | None = None) -> PolicyJob:
    """Return a policy job on the benchmark's models, with these values of dotted keys."""
    config = bench.config
    job = PolicyJob.model_validate(
        {
            "run": {"root": config.run.folder, "name": "steps", "seed": config.run.seed},
            "model": {"policy": str(bench.models.fixed)},
            "cluster": config.cluster,
            "data": {"path": "none"},
            "num_steps": MOST_STEPS,
            "feedback": {"source": "pkg:judge"},
            "rollout": config.rollout,
            "learner": config.learner,
            "checkpoint": {"every": MOST_STEPS},
        }
    )
    return with_overrides(job, changes or {})


class Counted(FeedbackSource):
    """A feedback source without cost that praises each "a", like TRL's reward function here."""

    name = "program"

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        places = [("a", k + 1) for k in range(min(8, response_text.count("a")))]
        return make_feedback(CRITIQUE, places, [], response_text, source=self.name, version="")


class BareTask(PromptsTask):
    """A task whose teacher reads a prompt and a critique, and no instructions, which would be longer than both."""

    def teacher_messages(self, prompt: Prompt, critique: str) -> list[Message]:
        return [{"role": "user", "content": prompt.prompt_text + critique}]


@asynccontextmanager
async def running_loop(bench: Bench, job: PolicyJob) -> AsyncIterator[Side]:
    """Yield the side that is one step of the trainer on real parts; the trainer waits at the end of each step."""
    may_go_on, has_ended = asyncio.Semaphore(0), asyncio.Semaphore(0)
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
        await asyncio.wait([asyncio.ensure_future(has_ended.acquire()), running], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        return Done(
            amount=job.rollout.prompts_per_step * job.rollout.samples_per_prompt * job.rollout.max_new_tokens,
            more={name: last_metrics[metric] for name, metric in PARTS.items() if metric in last_metrics},
        )

    folder, prompts = job.run.folder, bench.models.prompts
    with Fleets() as fleets, closing(RunLog(folder, job.log)) as log:
        fleet = fleets.rollouts(job.model, job.rollout, job)
        with loaded_learner(learner_spec(job), placement_timeout_s=job.cluster.placement_timeout_s) as learner:
            trainer = Trainer(
                config=job, task=BareTask(), tokenizer=bench.models.tokenizer,
                prompts=prompts, eval_prompts=(),
                rollouts=fleet, feedback=Counted(), learner=learner,
                sync=WeightSync(learner, fleet, job.learner, prompts=[prompt.prompt_ids for prompt in prompts]),
                log=log, checkpoints=CheckpointStore(folder / "checkpoints", 1), identity=Identity.from_config(job),
                stop=lambda: False, extra_metrics=wait_for_turn,
                on_step=lambda _, metrics: last_metrics.update(metrics),
            )  # fmt: skip
            log.truncate(0)
            running = asyncio.ensure_future(run())
            try:
                yield step
            finally:
                await cancel_all([running])
