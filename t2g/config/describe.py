"""What a config amounts to, in plain words, for `--dry-run`. Pure arithmetic on the config; upper bounds say so."""

from math import ceil

from t2g.config import (
    AnnotateJob,
    DemoJob,
    LearnerConfig,
    PolicyJob,
    ProcessConfig,
    RewardJob,
    RolloutConfig,
    SFTJob,
    SFTOptions,
)


def _told(job: PolicyJob | DemoJob | SFTJob | AnnotateJob | RewardJob, *lines: str) -> str:
    return "\n".join([*lines, f"run folder: {job.run.folder}"])


def describe_policy(job: PolicyJob) -> str:
    """jobs.train_policy: sizes of one step and of the run, then the resources."""
    samples = job.num_steps * samples_per_step(job.rollout)
    roles: dict[str, ProcessConfig] = {"rollout": job.rollout} | job.learner.roles(job.objective)
    if job.feedback.own_engines:
        roles[str(job.feedback.model_asked)] = job.feedback.engine
    evaluation = "none, there is no eval_data"
    if job.eval_data is not None:
        evaluation = (
            f"every {_count(job.eval.every, 'step')}, {_count(job.eval.num_prompts, 'prompt')} x "
            f"{_count(job.eval.samples_per_prompt, 'sample')} of {job.eval_data.path}"
        )
    return _told(
        job,
        *_step_lines(job.rollout, job.learner),
        f"run: {_count(job.num_steps, 'step')}, {_count(samples, 'sample')} in all",
        f"feedback: {job.feedback.source}",
        f"evaluation: {evaluation}",
        *_resource_lines(roles),
    )


def describe_demo(job: DemoJob) -> str:
    samples = job.num_steps * samples_per_step(job.rollout)
    return _told(
        job,
        f"world: {_count(job.world.num_train, 'post')} to train on, {job.world.num_heldout} held out",
        f"base policy: {_sft(job.policy_sft)}",
        f"stage 1: {_count(job.annotate, 'response')} sampled and criticised by program",
        f"stage 2: reward model, {_sft(job.reward_sft)}",
        f"stage 3: {_count(len(job.arms), 'arm')} ({', '.join(job.arms)}), one after the other",
        *_step_lines(job.rollout, job.learner),
        f"run: {_count(job.num_steps, 'step')} and {_count(samples, 'sample')} for each arm",
        *_resource_lines({"rollout": job.rollout, **job.learner.roles(job.objective), "reward": job.reward_engine}),
    )


def describe_sft(job: SFTJob) -> str:
    return _told(job, f"supervised: {_sft(job.sft)}", *_resource_lines({"trainer": job.sft}))


def describe_annotate(job: AnnotateJob) -> str:
    options, roles = job.annotate, dict[str, ProcessConfig]()
    what = f"the response of each record of {job.data.path}"
    if options.responses == "policy":
        roles["rollout"] = job.rollout
        what = (
            f"{_count(job.rollout.samples_per_prompt, 'response')} to each prompt of {job.data.path}, "
            f"temperature {job.rollout.temperature:g}, at most {job.rollout.max_new_tokens} tokens each"
        )
    if options.own_engines:
        roles[str(options.model_asked)] = options.engine
    aligner = f", aligned by {options.align}" if options.source == "human" and options.align else ""
    return _told(
        job,
        what,
        f"feedback: {options.source}{aligner}; records of {options.heldout_share:.0%} of the prompts are held out",
        *(_resource_lines(roles) if roles else ["no engines of our own, and no Ray"]),
    )


def describe_reward(job: RewardJob) -> str:
    return _told(
        job,
        f"supervised: {_sft(job.sft)}",
        f"evaluation: at most {_count(job.eval_records, 'record')} of {job.eval_data.path}",
        *_resource_lines({"trainer": job.sft, "then reward": job.engine}, together=False),
    )


def samples_per_step(rollout: RolloutConfig) -> int:
    return rollout.prompts_per_step * rollout.samples_per_prompt


def max_microbatches(rollout: RolloutConfig, learner: LearnerConfig) -> int:
    """Most microbatches of one optimizer step on one rank, if every sequence were max_model_len tokens long.

    64 samples, 1 minibatch, 1 rank, 4096 tokens a microbatch, 1024 a sequence: 4 sequences fit, so 16 microbatches.
    """
    sequences_per_microbatch = max(1, learner.tokens_per_microbatch // rollout.max_model_len)
    sequences = ceil(samples_per_step(rollout) / (learner.minibatches_per_epoch * learner.workers))
    return ceil(sequences / sequences_per_microbatch)


def _step_lines(rollout: RolloutConfig, learner: LearnerConfig) -> list[str]:
    samples = samples_per_step(rollout)
    updates = learner.num_epochs * learner.minibatches_per_epoch
    return [
        f"step: {_count(rollout.prompts_per_step, 'prompt')} x {_count(rollout.samples_per_prompt, 'sample')} = "
        f"{_count(samples, 'sample')}, at most {rollout.max_new_tokens} new tokens each, "
        f"temperature {rollout.temperature:g}",
        f"update: {_count(learner.num_epochs, 'epoch')} x {_count(learner.minibatches_per_epoch, 'minibatch')} = "
        f"{_count(updates, 'optimizer step')} a step, each of at most "
        f"{_count(max_microbatches(rollout, learner), 'microbatch')} of {learner.tokens_per_microbatch} tokens "
        f"on each of {_count(learner.workers, 'rank')}",
    ]


def _sft(options: SFTOptions) -> str:
    """The number of examples is not known before the data is read."""
    return (
        f"{options.num_epochs:g} epochs, {_count(options.batch_size, 'example')} an optimizer step "
        f"(steps = {options.num_epochs:g} x examples / {options.batch_size}), {_count(options.workers, 'rank')}"
    )


def _resource_lines(roles: dict[str, ProcessConfig], *, together: bool = True) -> list[str]:
    """One line a role; then the sum, where the roles live at the same time."""
    lines = [
        f"{name}: {_count(role.num_processes, 'actor')}, each {role.cpus:g} CPU, {role.gpus:g} GPU, "
        f"{_count(role.threads, 'thread')}, about {role.memory_gib:g} GiB"
        for name, role in roles.items()
    ]
    if together:
        cpus, gpus, memory_gib = (
            sum(role.num_processes * getattr(role, name) for role in roles.values())
            for name in ("cpus", "gpus", "memory_gib")
        )
        lines.append(f"together: {cpus:g} CPU, {gpus:g} GPU, about {memory_gib:g} GiB")
    return lines


def _count(number: int, noun: str) -> str:
    """1 post, 4,000 posts, 2 minibatches."""
    plural = "" if number == 1 else "es" if noun.endswith("batch") else "s"
    return f"{number:,} {noun}{plural}"
