"""Compare the learner's ranks with plain torch on the same rows, and shared with separate prompts.

A measurement has the passes of reference and policy, the backward pass and one AdamW step.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from actors.learner.learner import LearnerGroup
from jobs.benchmark_phases.bare import BareLearner, begin
from jobs.benchmark_phases.phase_step import loop_job, random_sample, random_samples
from jobs.benchmark_phases.timer import Bench, Comparison, Done, Record, Side
from jobs.common.fleets import start_learner
from jobs.train_policy.policy_training import make_learner_spec
from t2g.config.describe import format_count
from t2g.data.batching import make_train_batch
from t2g.resources.flops import train_flops
from t2g.resources.model_shape import find_shape
from t2g.types import Rollout, TrainSample

AIM = 0.85
AIM_SHARED = 1.15


async def measure(bench: Bench) -> list[Record]:
    config = bench.config
    model = str(bench.models.fixed)
    bare = begin(BareLearner, config.learner, model, config.learner)
    shape = find_shape(model, None)
    assert shape is not None, "the model was just made"
    samples_by_name = {
        "learner, fixed length": random_samples(bench),
        "learner, exponential": random_samples(bench, exponential=True),
    }
    records: list[Record] = []
    with ExitStack() as stack:
        groups = {format_count(ranks, "rank"): stack.enter_context(make_group(bench, ranks)) for ranks in (1, 2)}
        for name, samples in samples_by_name.items():
            lengths = [len(sample) for sample in samples]
            # The reference's forward pass is a third of the policy's two.
            gflop = 4 / 3 * train_flops(shape, lengths, has_head=True, frozen=False) / 1e9
            sides: dict[str, Side] = {"plain torch": partial(step_bare, bare, samples, gflop)}
            for who, group in groups.items():
                sides[who] = partial(update, group, samples, gflop)
            aims = dict.fromkeys(groups, AIM)
            comparison = Comparison(name=name, unit="tokens", sides=sides, reference="plain torch", aims=aims)
            records.append(await bench.measure(comparison))
    records.append(await measure_shared_prompts(bench))
    return records


async def measure_shared_prompts(bench: Bench) -> Record:
    """Compare a rank that computes each prompt once with one that computes it for every response.

    On a CPU their attention differs, too: transformers' eager one, and torch's.
    """
    samples = grouped_samples(bench)
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, shares in (("a prompt for each response", False), ("share_prompts", True)):
            group = stack.enter_context(make_group(bench, 1, {"learner.share_prompts": shares}))
            sides[name] = partial(update_group, group, samples)
        comparison = Comparison(
            name="learner, long prompts",
            unit="tokens",
            sides=sides,
            reference="a prompt for each response",
            aims={"share_prompts": AIM_SHARED},
        )
        return await bench.measure(comparison)


def grouped_samples(bench: Bench) -> list[TrainSample]:
    """Return the samples of a step whose prompts and responses fill the window."""
    rollout = bench.config.rollout
    rng = np.random.default_rng(bench.config.run.seed)
    length = rollout.max_new_tokens
    weight = 1 / (length * rollout.prompts_per_step * rollout.samples_per_prompt)
    samples: list[TrainSample] = []
    for _ in range(rollout.prompts_per_step):
        prompt_ids = rng.integers(5, 300, rollout.max_prompt_tokens).astype(np.int32)
        samples += [random_sample(prompt_ids, length, weight, rng) for _ in range(rollout.samples_per_prompt)]
    return samples


async def step_bare(bare: Any, samples: list[TrainSample], gflop: float) -> Done:
    started = time.monotonic()
    tokens = await bare.step.remote(samples)
    seconds = time.monotonic() - started
    return Done(amount=tokens, more={"GFLOP/s": gflop / seconds})


def make_group(
    bench: Bench, ranks: int, changes: Mapping[str, Any] | None = None
) -> AbstractContextManager[LearnerGroup]:
    """Return a group of ranks that share the threads of `learner.threads`; changes: values of dotted keys."""
    threads = max(1, bench.config.learner.threads // ranks)
    job = loop_job(bench, {"learner.workers": ranks, "learner.threads": threads, **(changes or {})})
    spec = make_learner_spec(job)
    return start_learner(spec, placement_timeout_s=job.cluster.placement_timeout_s)


async def update(group: LearnerGroup, samples: list[TrainSample], gflop: float) -> Done:
    """Make the learner's calls of a step; return its padding share and its microbatches per rank."""
    started = time.monotonic()
    done = await update_group(group, samples)
    rate = gflop / (time.monotonic() - started)

    num_ranks = group.spec.learner.workers
    plan = group.spec.plan(samples, num_ranks)
    shares = list(chain.from_iterable(plan))
    area = 0  # tokens and padding of all microbatches
    for share in shares:
        lengths = [len(samples[index]) for index in share]
        area += len(share) * max(lengths, default=0)
    padding = 1 - done.amount / area
    microbatches_per_rank = len(shares) / num_ranks
    more = {"GFLOP/s": rate, "padding": padding, "microbatches": microbatches_per_rank}
    return Done(amount=done.amount, more=more)


async def update_group(group: LearnerGroup, samples: list[TrainSample]) -> Done:
    """Make the learner's calls of a step; prompts count as often as the samples have them."""
    rollouts = [rollout_of(sample) for sample in samples]
    await asyncio.to_thread(group.forward, rollouts)
    batch = make_train_batch(samples, num_epochs=1, minibatches_per_epoch=1, kl_coef=0.05, seed=1)
    await asyncio.to_thread(group.update, batch)
    return Done(amount=sum(map(len, samples)))


def rollout_of(sample: TrainSample) -> Rollout:
    length = len(sample.response_ids)
    return Rollout(
        prompt_id="p", sample_index=0, prompt_ids=sample.prompt_ids, response_ids=sample.response_ids,
        rollout_logprobs=np.zeros(length, np.float32), response_text="", finish_reason="length",
        policy_versions=((0, length, 0),),
    )  # fmt: skip
