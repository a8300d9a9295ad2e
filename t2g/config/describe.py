"""Summaries of config sections for `AnyJob.describe`: arithmetic on the config alone. Upper bounds say so."""

from collections.abc import Mapping
from math import ceil

from t2g.config.common import GpuSharing, ProcessConfig
from t2g.config.feedback import RolloutConfig
from t2g.config.learning import LearnerConfig, ObjectiveConfig, SFTOptions


def samples_per_step(rollout: RolloutConfig) -> int:
    return rollout.prompts_per_step * rollout.samples_per_prompt


def max_microbatches(rollout: RolloutConfig, learner: LearnerConfig) -> int:
    """Return the most microbatches of one optimizer step on one rank: every sequence has max_model_len tokens.

    64 samples, 1 minibatch, 1 rank, 4096 tokens a microbatch, 1024 a sequence: 4 sequences fit, so 16 microbatches.
    """
    sequences_per_microbatch = max(1, learner.tokens_per_microbatch // rollout.max_model_len)
    sequences = ceil(samples_per_step(rollout) / (learner.minibatches_per_epoch * learner.workers))
    return ceil(sequences / sequences_per_microbatch)


def format_steps(rollout: RolloutConfig, learner: LearnerConfig, num_steps: int, sharing: GpuSharing) -> list[str]:
    """Return the sizes of one step of PPO and of the run."""
    samples = samples_per_step(rollout)
    updates = learner.num_epochs * learner.minibatches_per_epoch
    return [
        f"step: {count(rollout.prompts_per_step, 'prompt')} x {count(rollout.samples_per_prompt, 'sample')} = "
        f"{count(samples, 'sample')}, {format_sampling(rollout)}",
        f"update: {count(learner.num_epochs, 'epoch')} x {count(learner.minibatches_per_epoch, 'minibatch')} = "
        f"{count(updates, 'optimizer step')} a step, each of at most "
        f"{count(max_microbatches(rollout, learner), 'microbatch')} of {learner.tokens_per_microbatch} tokens "
        f"on each of {count(learner.workers, 'rank')}",
        f"weights: by {learner.sync_transport}, into engines of {rollout.dtype}"
        + ("; engines and ranks time-share the GPUs" if sharing == "alternate" else ""),
        f"run: {count(num_steps, 'step')}, {count(num_steps * samples, 'sample')} in all",
    ]


def format_sampling(rollout: RolloutConfig) -> str:
    return f"temperature {rollout.temperature:g}, at most {rollout.max_new_tokens} new tokens each"


def format_objective(objective: ObjectiveConfig) -> str:
    paid = [f"{entry.weight:g} x {entry.source}" for entry in objective.outcome_rewards]
    outcome_rewards = f", outcome rewards {', '.join(paid)}" if paid else ""
    return f"objective: rewards at {objective.rewards.placement}, advantages {objective.advantages}{outcome_rewards}"


def format_turns(environment: str | None, rollout: RolloutConfig) -> list[str]:
    if environment is None:
        return []
    turns = f"at most {count(rollout.max_turns, 'turn')} in a window of {rollout.max_model_len} tokens"
    return [f"environment: {environment}, {turns}"]


def format_sft(options: SFTOptions) -> str:
    """Return the settings of supervised training; the number of steps depends on data that is not read yet."""
    return (
        f"{options.num_epochs:g} epochs, {count(options.batch_size, 'example')} an optimizer step "
        f"(steps = {options.num_epochs:g} x examples / {options.batch_size}), {count(options.workers, 'rank')}"
    )


def format_process(section: str, process: ProcessConfig) -> str:
    return (
        f"{section}: {count(process.num_processes, 'actor')}, each {process.cpus:g} CPU, {process.gpus:g} GPU, "
        f"{count(process.threads, 'thread')}, about {process.memory_gib:g} GiB"
    )


def format_resources(processes: Mapping[str, ProcessConfig]) -> list[str]:
    """Return one line for each role, then the sum."""
    if not processes:
        return ["no own engines, and no Ray"]
    cpus, gpus, memory_gib = (
        sum(process.num_processes * getattr(process, field) for process in processes.values())
        for field in ("cpus", "gpus", "memory_gib")
    )
    lines = [format_process(section, process) for section, process in processes.items()]
    return [*lines, f"together: {cpus:g} CPU, {gpus:g} GPU, about {memory_gib:g} GiB"]


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 post", "4,000 posts", "2 minibatches"."""
    plural = "" if number == 1 else "es" if noun.endswith("batch") else "s"
    return f"{number:,} {noun}{plural}"
