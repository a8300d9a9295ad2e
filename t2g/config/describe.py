"""What a config amounts to, in plain words, for `--dry-run`. Pure arithmetic on the config; upper bounds say so."""

from math import ceil

from t2g.config.common import ProcessConfig
from t2g.config.evaluation import PolicyEvaluationJob
from t2g.config.feedback import RolloutConfig
from t2g.config.jobs import (
    AnnotateJob,
    AnyJob,
    DemoJob,
    EvaluateJob,
    PolicyJob,
    RewardJob,
    SFTJob,
)
from t2g.config.learning import LearnerConfig, SFTOptions
from t2g.config.serving import ServeJob
from t2g.config.stopwatch import BenchmarkJob


def describe(job: AnyJob) -> str:
    """What the job does and how much of it, what its processes need, and where it writes."""
    return "\n".join([*_work(job), *_resources(job.roles()), f"run folder: {job.run.folder}"])


def _work(job: AnyJob) -> list[str]:
    match job:
        case PolicyJob():
            evaluation = "none, there is no eval_data"
            if job.eval_data is not None:
                samples = f"{_count(job.eval.num_prompts, 'prompt')} x {_count(job.eval.samples_per_prompt, 'sample')}"
                evaluation = f"every {_count(job.eval.every, 'step')}, {samples} of {job.eval_data.path}"
            return [*_steps(job), f"feedback: {job.feedback.source}", f"evaluation: {evaluation}"]
        case DemoJob():
            return [
                f"world: {_count(job.world.num_train, 'post')} to train on, {job.world.num_heldout} held out",
                f"base policy: {_sft(job.policy_sft)}",
                f"stage 1: {_count(job.annotate, 'response')} sampled, {job.planted:g} planted for each, then judged",
                f"stage 2: reward model, {_sft(job.reward_sft)}",
                f"stage 3: {_count(len(job.arms), 'arm')} ({', '.join(job.arms)}), one after the other, each",
                *_steps(job),
            ]
        case RewardJob():
            records = f"at most {_count(job.eval_records, 'record')} of {job.eval_data.path}"
            after = f"evaluation: {records}, when the training has given its place to {_process('engine', job.engine)}"
            return [f"supervised: {_sft(job.sft)}", after]
        case SFTJob():
            return [f"supervised: {_sft(job.sft)}"]
        case AnnotateJob():
            options = job.annotate
            what = f"the response of each record of {job.data.path}"
            if options.responses == "policy":
                each = _count(job.rollout.samples_per_prompt, "response")
                what = f"{each} to each prompt of {job.data.path}, {_sampling(job.rollout)}"
            what += f"; {options.planted:g} more for each prompt with planted faults" if options.planted else ""
            aligner = f", aligned by {options.align}" if options.source == "human" and options.align else ""
            heldout = f"records of {options.heldout_share:.0%} of the prompts are held out"
            return [what, f"feedback: {options.source}{aligner}; {heldout}"]
        case PolicyEvaluationJob():
            each = f"{_count(job.rollout.samples_per_prompt, 'response')} to each prompt of {job.data.path}"
            who = f"policies: {', '.join(job.names)}; judges: {', '.join(job.judges) or 'none'}"
            return [who, f"{each}, {_sampling(job.rollout)}"]
        case BenchmarkJob():
            phases = ", ".join(job.phases) or "all that were not measured yet"
            return [f"phases: {phases}; {job.repeats} turns of each side, after one that is discarded"]
        case ServeJob():
            return [
                f"{job.serve.name}: {job.model.policy}, on {job.serve.host}",
                f"then: {job.serve.then or 'nothing'}",
            ]
        case EvaluateJob():
            records = f"{job.data.path}, each judged twice, with and without guided decoding"
            return [f"reward model: {job.feedback.reward_model}", f"held-out records: {records}"]
    raise TypeError(f"{type(job).__name__} has no description")


def samples_per_step(rollout: RolloutConfig) -> int:
    return rollout.prompts_per_step * rollout.samples_per_prompt


def max_microbatches(rollout: RolloutConfig, learner: LearnerConfig) -> int:
    """Most microbatches of one optimizer step on one rank, if every sequence were max_model_len tokens long.

    64 samples, 1 minibatch, 1 rank, 4096 tokens a microbatch, 1024 a sequence: 4 sequences fit, so 16 microbatches.
    """
    sequences_per_microbatch = max(1, learner.tokens_per_microbatch // rollout.max_model_len)
    sequences = ceil(samples_per_step(rollout) / (learner.minibatches_per_epoch * learner.workers))
    return ceil(sequences / sequences_per_microbatch)


def _steps(job: PolicyJob | DemoJob) -> list[str]:
    """Sizes of one step and of the run."""
    rollout, learner, samples = job.rollout, job.learner, samples_per_step(job.rollout)
    updates = learner.num_epochs * learner.minibatches_per_epoch
    return [
        f"step: {_count(rollout.prompts_per_step, 'prompt')} x {_count(rollout.samples_per_prompt, 'sample')} = "
        f"{_count(samples, 'sample')}, {_sampling(rollout)}",
        f"update: {_count(learner.num_epochs, 'epoch')} x {_count(learner.minibatches_per_epoch, 'minibatch')} = "
        f"{_count(updates, 'optimizer step')} a step, each of at most "
        f"{_count(max_microbatches(rollout, learner), 'microbatch')} of {learner.tokens_per_microbatch} tokens "
        f"on each of {_count(learner.workers, 'rank')}",
        f"weights: by {learner.sync_transport}, into engines of {rollout.dtype}"
        + ("; engines and ranks have the GPUs in turn" if job.cluster.colocate else ""),
        f"run: {_count(job.num_steps, 'step')}, {_count(job.num_steps * samples, 'sample')} in all",
    ]


def _sampling(rollout: RolloutConfig) -> str:
    return f"temperature {rollout.temperature:g}, at most {rollout.max_new_tokens} new tokens each"


def _sft(options: SFTOptions) -> str:
    """The number of examples is not known before the data is read."""
    return (
        f"{options.num_epochs:g} epochs, {_count(options.batch_size, 'example')} an optimizer step "
        f"(steps = {options.num_epochs:g} x examples / {options.batch_size}), {_count(options.workers, 'rank')}"
    )


def _process(section: str, process: ProcessConfig) -> str:
    return (
        f"{section}: {_count(process.num_processes, 'actor')}, each {process.cpus:g} CPU, {process.gpus:g} GPU, "
        f"{_count(process.threads, 'thread')}, about {process.memory_gib:g} GiB"
    )


def _resources(found: dict[str, ProcessConfig]) -> list[str]:
    """One line a role, then the sum."""
    if not found:
        return ["no engines of our own, and no Ray"]
    cpus, gpus, memory_gib = (
        sum(process.num_processes * getattr(process, field) for process in found.values())
        for field in ("cpus", "gpus", "memory_gib")
    )
    lines = [_process(section, process) for section, process in found.items()]
    return [*lines, f"together: {cpus:g} CPU, {gpus:g} GPU, about {memory_gib:g} GiB"]


def _count(number: int, noun: str) -> str:
    """1 post, 4,000 posts, 2 minibatches."""
    plural = "" if number == 1 else "es" if noun.endswith("batch") else "s"
    return f"{number:,} {noun}{plural}"
