"""A whole step of the loop, real engines, ranks and sync, beside its floor, bare vLLM and plain torch in turn, and
beside TRL's GRPO: one optimizer step on the same number of tokens."""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
from ray.exceptions import RayError

from actors.cluster.fanout import first_line
from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from actors.learner.parts import LearnerSpec
from actors.weights.sync import WeightSync
from jobs.stopwatch.bare import BareEngine, BareLearner, begin
from jobs.stopwatch.bare_trl import Grpo
from jobs.stopwatch.watch import Bench, Done, Race, Record, Side
from t2g.concurrency import beside
from t2g.config import BenchmarkJob, PolicyJob, with_overrides
from t2g.feedback.parse import make_feedback
from t2g.interfaces import FeedbackSource
from t2g.loop.trainer import Trainer
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity
from t2g.runs.log import RunLog
from t2g.tasks.base import get_task
from t2g.types import Prompt, SpanFeedback, TrainSample

AIM = 1 / 1.15  # of the floor
AIM_TRL = 1.4
PARTS = {"generate_s": "time/generate_s", "learn_s": "time/learn_s", "sync_s": "time/sync_s"}
MOST_STEPS = 10_000
UNIT = "response tokens"
OURS, AHEAD, CRITIC = "here", "here, max_staleness=1", "here, with a critic"
EQUAL = OURS, AHEAD  # a critic is work that the others have not


async def measure(bench: Bench) -> list[Record]:
    """The same turns held against both; TRL has no side where it is not installed. The variants run by themselves:
    what samples ahead would do so in the others' turns."""
    sends = "" if bench.config.learner.gpus else ", weights not sent"
    names = {"TRL": False, f"TRL with vLLM{sends}": True} if find_spec("trl") else {}
    rivals = await able({name: trl(bench, vllm=vllm) for name, vllm in names.items()}, bench.config.deadline_s)
    async with LoopOfOurs(bench, loop_job(bench)) as ours:
        sides = {"floor": floor(bench), **rivals, OURS: ours.step}
        found = await bench.race(Race(name="step", unit=UNIT, sides=sides))
    measured = found["sides"]
    for name, changes in variants(bench.config).items():
        async with LoopOfOurs(bench, loop_job(bench, changes)) as ours:
            measured |= (await bench.race(Race(name="step", unit=UNIT, sides={name: ours.step})))["sides"]
    beside_floor = {name: side for name, side in measured.items() if name not in rivals}
    records = [{**found, "limit": "floor", "aims": dict.fromkeys(EQUAL, AIM), "sides": beside_floor}]
    if rivals:
        beside_trl = {name: side for name, side in measured.items() if name != "floor"}
        records.append(
            {**found, "name": "GRPO step", "limit": "TRL", "aims": dict.fromkeys(EQUAL, AIM_TRL), "sides": beside_trl}
        )
    return records


async def able(rivals: Mapping[str, Side], deadline_s: float) -> dict[str, Side]:
    """Those that can make a step; of the others it is said why, and ours is measured all the same."""
    found = {}
    for name, side in rivals.items():
        try:
            await asyncio.wait_for(side(), deadline_s)
            found[name] = side
        except (RayError, TimeoutError) as error:
            print(f"  {name} has no side: {first_line(error)}", flush=True)
    return found


def variants(config: BenchmarkJob) -> dict[str, dict[str, Any]]:
    """Engines and ranks that work at once share the cores, as `threads=auto` would have it."""
    shared = {f"{role}.threads": max(1, getattr(config, role).threads // 2) for role in ("rollout", "learner")}
    return {
        AHEAD: {"rollout.max_staleness": 1, **shared},
        CRITIC: {"objective.advantages": "gae"},
    }


def trl(bench: Bench, *, vllm: bool) -> Side:
    """The same model, prompts, samples, forward passes (policy once, reference once), beta, dtype and threads; with
    `generate`, or the engine's own environment and vLLM."""
    config = bench.config
    texts = [prompt.prompt_text for prompt in bench.models.prompts]
    role = config.rollout if vllm else config.learner
    actor = begin(Grpo, role, str(bench.models.fixed), texts, config, vllm=vllm)

    async def side() -> Done:
        tokens, more = await actor.step.remote(config.deadline_s)
        return Done(amount=tokens, more=more)

    return side


def floor(bench: Bench) -> Side:
    """The samples of a step by bare vLLM, and then the update by plain torch."""
    config, prompts = bench.config, bench.models.prompts
    engine = begin(BareEngine, config.rollout, str(bench.models.fixed), config.rollout, config.run.seed)
    learner = begin(BareLearner, config.learner, str(bench.models.fixed), config.learner)
    asked = [p for p in prompts[: config.rollout.prompts_per_step] for _ in range(config.rollout.samples_per_prompt)]
    samples = random_samples(bench)

    async def side() -> Done:
        loop = asyncio.get_running_loop()
        started = loop.time()
        tokens = await engine.generate.remote(
            [p.prompt_ids for p in asked], logprobs=0, max_tokens=config.rollout.max_new_tokens, temperature=1.0
        )
        sampled = loop.time()
        await learner.step.remote(samples)
        return Done(amount=tokens, more={"generate_s": sampled - started, "learn_s": loop.time() - sampled})

    return side


def random_samples(bench: Bench, *, exponential: bool = False) -> list[TrainSample]:
    """As many as a step has, as long as max_new_tokens allows, or exponentially, half of that in the mean."""
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
    """A run of the loop on the benchmark's models, with other values at these dotted keys."""
    config = bench.config
    job = PolicyJob.model_validate(
        {
            "run": {"root": config.run.folder, "name": "steps", "seed": config.run.seed},
            "model": {"policy": str(bench.models.fixed)},
            "data": {"path": "none"},
            "num_steps": MOST_STEPS,
            "feedback": {"source": "pkg:critic"},
            "rollout": config.rollout,
            "learner": config.learner,
            "checkpoint": {"every": MOST_STEPS},
        }
    )
    return with_overrides(job, changes or {})


class Counted(FeedbackSource):
    """Praises each a: a source that costs nothing, as TRL's reward function here."""

    name = "program"

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        places = [("a", k + 1) for k in range(min(8, response_text.count("a")))]
        return make_feedback("a", places, [], response_text, source=self.name, version="")


class LoopOfOurs:
    """The trainer on real parts, which makes one step when it is told to: it waits at each step's end."""

    def __init__(self, bench: Bench, job: PolicyJob) -> None:
        self._job, self._models = job, bench.models
        self._go, self._ended = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self._running: asyncio.Task[Any] | None = None
        self._parts = ExitStack()
        self._seen: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._parts.close()  # nobody else would, and the next phases need the places
            raise
        return self

    def _begin(self) -> None:
        job, timeout_s = self._job, self._job.cluster.placement_timeout_s
        spec = LearnerSpec(
            model=job.model, learner=job.learner, objective=job.objective, num_updates=MOST_STEPS, seed=job.run.seed
        )
        enter = self._parts.enter_context
        how: dict[str, Any] = {"seed": job.run.seed, "transport": job.learner.sync_transport}
        self.fleet = fleet = enter(
            closing(RolloutFleet(job.model.policy, job.rollout, placement_timeout_s=timeout_s, **how))
        )
        learner = enter(closing(LearnerGroup(spec, placement_timeout_s=timeout_s)))
        fleet.wait_ready()
        folder = job.run.folder
        self._trainer = Trainer(
            config=job, task=get_task("prompts"), tokenizer=self._models.tokenizer,
            prompts=self._models.prompts, eval_prompts=(),
            rollouts=fleet, feedback=Counted(), learner=learner,
            sync=WeightSync(learner, fleet, job.learner, prompts=[p.prompt_ids for p in self._models.prompts]),
            log=enter(closing(RunLog(folder, job.log))), checkpoints=CheckpointStore(folder / "checkpoints", 1),
            identity=Identity.of(job),
            stop=lambda: False, extra_metrics=self._pause, on_step=self._note,
        )  # fmt: skip
        self._trainer.log.truncate(0)

    async def step(self) -> Done:
        """All its responses have max_new_tokens. What it says of its parts is of the step before."""
        if self._running is None:
            self._running = asyncio.ensure_future(beside(self._trainer.run(), self.fleet.supervise()))
        else:
            self._go.release()
        ended = asyncio.ensure_future(self._ended.acquire())
        await asyncio.wait([ended, self._running], return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            self._running.result()
        rollout = self._job.rollout
        return Done(
            amount=rollout.prompts_per_step * rollout.samples_per_prompt * rollout.max_new_tokens,
            more={name: self._seen[metric] for name, metric in PARTS.items() if metric in self._seen},
        )

    async def _pause(self) -> dict[str, float]:
        self._ended.release()
        await self._go.acquire()
        return {}

    def _note(self, step: int, metrics: dict[str, float]) -> None:
        self._seen = metrics

    async def __aexit__(self, *error: object) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        self._parts.close()
