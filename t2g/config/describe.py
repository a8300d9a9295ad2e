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

    With shared prompts the responses to a prompt may leave a microbatch partly empty.
    """
    sequences_per_microbatch = max(1, learner.tokens_per_microbatch // rollout.max_model_len)
    samples = ceil(samples_per_step(rollout) / learner.minibatches_per_epoch)
    if learner.share_prompts:
        per_prompt = ceil(rollout.samples_per_prompt / sequences_per_microbatch)
        return ceil(min(samples, rollout.prompts_per_step * per_prompt) / learner.workers)
    return ceil(samples / learner.workers / sequences_per_microbatch)


def format_steps(rollout: RolloutConfig, learner: LearnerConfig, num_steps: int, sharing: GpuSharing) -> list[str]:
    """Return the sizes of one step of PPO and of the run."""
    num_samples = samples_per_step(rollout)
    prompts = format_count(rollout.prompts_per_step, "prompt")
    samples_of_prompt = format_count(rollout.samples_per_prompt, "sample")
    samples = format_count(num_samples, "sample")
    step = f"step: {prompts} x {samples_of_prompt} = {samples}, {format_sampling(rollout)}"
    num_further = rollout.resample_zero_groups
    if num_further:
        step += f"; at most {format_count(num_further, 'prompt')} more for those whose samples all earn the same"

    epochs = format_count(learner.num_epochs, "epoch")
    minibatches = format_count(learner.minibatches_per_epoch, "minibatch")
    updates = format_count(learner.num_epochs * learner.minibatches_per_epoch, "optimizer step")
    microbatches = format_count(max_microbatches(rollout, learner), "microbatch")
    ranks = format_count(learner.workers, "rank")
    update = (
        f"update: {epochs} x {minibatches} = {updates} a step, each of at most {microbatches} of "
        f"{learner.tokens_per_microbatch} tokens on each of {ranks}"
    )

    weights = f"weights: by {learner.sync_transport}, into engines of {rollout.dtype}"
    if sharing == "alternate":
        weights += "; engines and ranks time-share the GPUs"

    steps = format_count(num_steps, "step")
    all_samples = format_count(num_steps * num_samples, "sample")
    run = f"run: {steps}, {all_samples} in all"
    if num_further:
        more = num_steps * num_further * rollout.samples_per_prompt
        run += f", and at most {more:,} more"
    return [step, update, weights, run]


def format_sampling(rollout: RolloutConfig) -> str:
    return f"temperature {rollout.temperature:g}, at most {rollout.max_new_tokens} new tokens each"


def format_objective(objective: ObjectiveConfig) -> str:
    paid = [f"{entry.weight:g} x {entry.source}" for entry in objective.outcome_rewards]
    text = f"objective: rewards at {objective.rewards.placement}, advantages {objective.advantages}"
    if paid:
        text += f", outcome rewards {', '.join(paid)}"
    return text


def format_turns(environment: str | None, rollout: RolloutConfig) -> list[str]:
    if environment is None:
        return []
    turns = f"at most {format_count(rollout.max_turns, 'turn')} in a window of {rollout.max_model_len} tokens"
    return [f"environment: {environment}, {turns}"]


def format_sft(options: SFTOptions) -> str:
    """Return the settings of supervised training; the number of steps depends on data that is not read yet."""
    examples = format_count(options.batch_size, "example")
    ranks = format_count(options.workers, "rank")
    steps = f"steps = {options.num_epochs:g} x examples / {options.batch_size}"
    return f"{options.num_epochs:g} epochs, {examples} an optimizer step ({steps}), {ranks}"


def format_process(section: str, process: ProcessConfig) -> str:
    actors = format_count(process.num_processes, "actor")
    devices = f"{process.cpus:g} CPU, {process.gpus:g} GPU"
    threads = format_count(process.threads, "thread")
    return f"{section}: {actors}, each {devices}, {threads}, about {process.memory_gib:g} GiB"


def format_resources(processes: Mapping[str, ProcessConfig]) -> list[str]:
    """Return one line for each role, then the sum."""
    if not processes:
        return ["no own engines, and no Ray"]
    lines: list[str] = []
    cpus = 0.0
    gpus = 0.0
    memory_gib = 0.0
    for section, process in processes.items():
        lines.append(format_process(section, process))
        cpus += process.num_processes * process.cpus
        gpus += process.num_processes * process.gpus
        memory_gib += process.num_processes * process.memory_gib
    return [*lines, f"together: {cpus:g} CPU, {gpus:g} GPU, about {memory_gib:g} GiB"]


def format_count(number: float, noun: str) -> str:
    """Return a number with its noun: "1 post", "4,000 posts", "2 minibatches", "0.5 GPUs"."""
    digits = f"{int(number):,}" if number == int(number) else f"{number:g}"
    if number == 1:
        return f"{digits} {noun}"
    ending = "es" if noun.endswith("batch") else "s"
    return f"{digits} {noun}{ending}"
