"""The registry of metrics: the name, unit and meaning of each number that a run logs.

A step logs a flat mapping, name -> number; `t2g.runs.log` writes it. Code takes the names from here, and `make docs`
writes them into `t2g/guides/metrics.md`. The end of the module reads the mappings.

Names have placeholders: `<role>` stands for rollout or reward, `<model>` for policy or critic, and any other one for a
name that the run defines, such as a criterion.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

CHOICES = {"role": ("rollout", "reward"), "model": ("policy", "critic")}
_PLACEHOLDER = re.compile(r"<(\w+)>")


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of metrics whose name has placeholders.

    Attributes:
        unit: The unit of the number, with what a mean is taken over: nats per token. A share lies in [0, 1].
    """

    name: str
    unit: str
    meaning: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of the names of the family."""
        pieces = []
        end = 0
        for placeholder in _PLACEHOLDER.finditer(self.name):
            pieces.append(re.escape(self.name[end : placeholder.start()]))
            choices = CHOICES.get(placeholder[1])
            pieces.append(f"(?:{'|'.join(choices)})" if choices else ".+")
            end = placeholder.end()
        pieces.append(re.escape(self.name[end:]))
        return re.compile("".join(pieces))


METRICS: dict[str, Metric] = {}  # by name


def _add(name: str, unit: str, meaning: str) -> str:
    """Register a metric and return its name; of a name that ends with a placeholder the part before it."""
    assert name not in METRICS
    METRICS[name] = Metric(name, unit, meaning)
    is_prefix = name.endswith(">")
    return name[: name.rindex("<")] if is_prefix else name


def find_metric(name: str) -> Metric | None:
    """Return the metric of a logged name, or None for a name that is not registered.

    >>> find_metric("rollout/workers").name, find_metric("policy/klx")
    ('<role>/workers', None)
    """
    if name in METRICS:
        return METRICS[name]
    return next((metric for metric in METRICS.values() if metric.pattern.fullmatch(name)), None)


def fill(name: str, choice: str) -> str:
    """Return a name with its placeholder replaced.

    >>> fill("<role>/workers", "reward")
    'reward/workers'
    """
    return _PLACEHOLDER.sub(choice, name)


STEP = _add("step", "steps", "number of the step, from 1; step 0 is the policy before any update")
SAMPLES = _add("samples", "responses", "sampled for training so far, in all steps")

TOKEN_REWARD = _add("reward/token_mean", "reward per token", "of response tokens: spans and truncation penalty")
RESPONSE_REWARD = _add("reward/response_mean", "reward per response", "sum of the token rewards")
TOTAL_REWARD = _add("reward/total_mean", "reward per response", "span_coef x spans + penalty + outcome rewards")
OUTCOME_MEAN = _add("reward/outcome_mean", "reward per response", "weighted sum of objective.outcome_rewards, if any")
OUTCOME_REWARD = _add("reward/outcome/<source>", "reward per response", "one of them before its weight")
CRITERION_REWARD = _add("criterion_reward/<criterion>", "reward per response", "sum of the criterion's token rewards")

ZERO_VARIANCE = _add(
    "group/zero_variance_share",
    "share of prompts",
    "all samples earn the same at every token, or state of `objective.values`",
)
FURTHER_PROMPTS = _add("group/further_prompts", "prompts", "drawn in the step by rollout.resample_zero_groups")
REPLACED_PROMPTS = _add("group/replaced_prompts", "prompts", "all samples earn the same; a further one is trained")
GOOD_SHARE = _add("tokens/good_share", "share of tokens", "answer tokens in spans worth more than 0")
POOR_SHARE = _add("tokens/poor_share", "share of tokens", "answer tokens in spans worth less than 0")
NEUTRAL_SHARE = _add("tokens/neutral_share", "share of tokens", "all other answer tokens")
UNNAMED_SHARE = _add("tokens/unnamed_share", "share of tokens", "sampled ids for which the tokenizer has no token")
ZERO_ADVANTAGE = _add("tokens/zero_advantage_share", "share of tokens", "trained tokens whose advantage is 0")
LABEL_SHARES = {"good": GOOD_SHARE, "poor": POOR_SHARE, "neutral": NEUTRAL_SHARE}

KL = _add("policy/kl", "nats per sequence", "KL to the reference: mean of the sum over tokens")
KL_PER_TOKEN = _add("policy/kl_per_token", "nats per token", "KL to the reference, of sampled tokens")
KL_COEF = _add("policy/kl_coef", "", "beta of this step")
ENTROPY = _add("policy/entropy", "nats per token", "of the policy")
POLICY_LOSS = _add("policy/loss", "", "mean over minibatches")
CRITIC_LOSS = _add("critic/loss", "", "mean over minibatches")
KL_LOSS = _add("policy/kl_loss", "nats per token", "KL as a term of the loss (k3, full), before its coefficient")
GRAD_NORM = _add("<model>/grad_norm", "", "before clipping, mean over minibatches")
LEARNING_RATE = _add("<model>/lr", "", "learning rate, mean over minibatches")
ACCURACY = _add("policy/accuracy", "share of pairs", "of pairs of responses, see `t2g.algo.losses.dpo_loss`")
MARGIN = _add("policy/margin", "nats per pair", "of pairs of responses, see `t2g.algo.losses.dpo_loss`")
CLIP_SHARE = _add("policy/clip_share", "share of tokens", "clipped: the clipped ratio decides their loss")
APPROX_KL = _add("policy/approx_kl", "nats per token", "old to new policy, k3")
RATIO_MAX = _add("policy/ratio_max", "", "largest probability ratio of a token, new by old")
VALUE_CLIP_SHARE = _add("critic/clip_share", "share of tokens", "the clipped value error is larger than the unclipped")
MFU = _add("<model>/mfu", "share of peak FLOPs", "model FLOPs by those of the GPUs in bfloat16; not on a CPU")

TEACHER_SHARE = _add("teacher/share", "share of responses", "with a critique for objective.teacher")
TEACHER_GAP = _add(
    "teacher/gap_<kind>", "nats per token",
    "teacher - policy logprob of tokens in good spans, in poor spans, and of the first token of each poor run "
    "(kind: good, poor, poor_first)",
)  # fmt: skip
TEACHER_CONTRAST = _add(
    "teacher/contrast", "nats per token", "min(0, gap_good) - gap_poor_first; below 0 the teacher will not help"
)
TEACHER_KL = _add("teacher/kl", "nats per token", "KL(policy || teacher), where it is distilled; 0 without a critique")
TEACHER_CLIPPED = _add(
    "teacher/clipped_share", "share of trained tokens", "|teacher - policy logprob| above log(objective.teacher.bound)"
)

LENGTH = _add("response/length_mean", "tokens", "sampled tokens, EOS included")
TRUNCATED_SHARE = _add("response/truncated_share", "share of responses", "truncated by max_new_tokens")
UNANSWERED_SHARE = _add(
    "response/unanswered_share", "share of responses", "end within their thinking; only of models that think"
)
TURNS_PREFIX = "turns/"
TURNS = _add("turns/mean", "turns per conversation", "of the policy, with an environment")
WINDOW_SHARE = _add("turns/window_share", "share of conversations", "ended because rollout.max_model_len was full")
CALLS = _add("turns/calls", "calls per conversation", "of tools, with an environment that offers them")
MALFORMED_SHARE = _add("turns/malformed_share", "share of calls", "unreadable, of an unknown tool, or wrong arguments")
TOOL_ERROR_SHARE = _add("turns/tool_error_share", "share of calls", "the tool raised, or gave no usable answer")
UNPAID_SHARE = _add("turns/unpaid_share", "share of spans", "on the environment's text alone, which pay nothing")

GAP_MEAN = _add("gap/logprob_mean", "nats per token", "mean of |learner - engine| logprob")
GAP_P95 = _add("gap/p95", "nats per token", "95th percentile of |learner - engine| logprob")
GAP_CURRENT = _add(
    "gap/current_mean",
    "nats per token",
    "as gap/logprob_mean, of tokens that the weights before the update sampled",
)
IMPORTANCE_MEAN = _add("importance/mean", "", "mean weight exp(learner - engine) logprob, before the cap")
IMPORTANCE_P95 = _add("importance/p95", "", "95th percentile of the weights")
IMPORTANCE_OUTSIDE = _add("importance/outside_share", "share of tokens", "weight outside [.9, 1.1]")
IMPORTANCE_TRUNCATED = _add(
    "importance/truncated_share", "share of tokens", "whose weight rollout_correction_cap changed"
)

FAILED_SHARE = _add(
    "feedback/failed_share", "share of responses", "the feedback is neither ok nor empty, also of replaced prompts"
)
EMPTY_SHARE = _add("feedback/empty_share", "share of responses", "judged, without a span")
SOURCE_SHARE = _add("feedback/source/<source>", "share of responses", "judged by this source")
SAME_FEEDBACK = _add(
    "feedback/same_share", "share of responses", "different ones whose feedback is the step's most frequent; from 8 on"
)
LOCATED_RATE = _add("feedback/located_rate", "share of quotes", "found in their response")
AT_MAX_SPANS = _add(
    "feedback/metrics/at_max_spans", "share of answers", "of the reward model, with as many quotes as engine.max_spans"
)
FEEDBACK_METRICS = _add("feedback/metrics/<name>", "", "of the feedback function: mean over the responses that have it")
RECALL = _add("feedback/recall_<class>", "share of faults", "of this class of the task: overlap poor spans")
FAULTS_PRAISED = _add("feedback/faults_praised", "share of faults", "known to the task: overlap good spans")
CRITERION_FAILED = _add(
    "criterion_failed/<criterion>", "share of responses", "without usable feedback of the criterion"
)
SANDBOX_SHARE = _add("sandbox/<mode>_share", "share of responses", "code whose tests ran in this mode")

STALENESS_MEAN = _add("staleness/mean", "updates", "between the weights that sampled a token and those it trains")
STALENESS_MAX = _add("staleness/max", "updates", "the most of a token")
BUFFERED = _add("buffer/samples", "responses", "judged, and trained in a later step")
DROPPED_SAMPLES = _add("dropped/samples", "responses", "of the step, without usable feedback or not sampled")
DROPPED_PROMPTS = _add("dropped/prompts", "prompts", "of the step, which no rollout worker could answer")

IDLE_LEARNER = _add("idle/learner", "share of the step", "without a call of the learner")
IDLE = _add("idle/<role>", "share of engine time", "without a request, since the step before")
WORKERS = _add("<role>/workers", "workers", "serve at the end of the step")
RESTARTS = _add("<role>/restarts", "workers", "failed since the step before")
_add("<role>/recovery_s", "seconds", "the longest from a failure until the replacement serves")
_add("<role>/tokens_per_s", "tokens per second", "generated by vLLM, by seconds with a request")
_add("<role>/queued", "requests", "wait for a slot in an engine, mean over engine steps")
_add("<role>/cache_use", "share of the KV cache", "the largest in use of an engine")
_add("<role>/preemptions", "requests", "preempted by vLLM and computed again")
LEARNER_RECOVERY = _add(
    "recovery/learner_s", "seconds", "from the learner's failure until its replacement has the weights"
)

SPEED = _add("speed/tokens_per_s", "tokens per second", "sampled tokens by seconds of the whole step")
LEARNER_SPEED = _add(
    "learner/tokens_per_s",
    "tokens per second",
    "of all passes in the update; a prompt counts for each response, also where it is computed once",
)
PEAK_MEMORY = _add(
    "learner/peak_memory_gib", "GiB", "largest peak of a rank: GPU memory of this update, or process on a CPU"
)
OPTIMIZER_STEPS = _add("learner/optimizer_steps", "minibatches", "of this step")
GENERATE_S = _add("time/generate_s", "seconds", "that the step waits for responses")
FEEDBACK_S = _add("time/feedback_s", "seconds", "from the last response until the last feedback")
LEARN_S = _add("time/learn_s", "seconds", "of forward passes, teacher, advantages and update")
SYNC_S = _add("time/sync_s", "seconds", "of the weight sync")
STEP_S = _add("time/step_s", "seconds", "of the step without its evaluation")
EVAL_S = _add("time/eval_s", "seconds", "of the evaluation")

SYNC = "sync/"
PROBE_GAP = _add("sync/probe_gap", "nats per token", "largest |engine - learner| logprob on the probe")
SYNC_BYTES = _add("sync/bytes", "bytes", "weights sent to each worker")
SYNC_CALLS = _add("sync/calls", "calls", "of workers and of the learner group")
SYNC_MISSED = _add("sync/missed", "workers", "that failed to get the weights")
_add("sync/open_s", "seconds", "to pause engines and send the manifest")
_add("sync/gather_s", "seconds", "to gather all buckets in the learner; gather, copy_to_core and load overlap")
_add("sync/copy_to_core_s", "seconds", "to copy all buckets to the engine core")
_add("sync/load_s", "seconds", "to load all buckets in the engines")
_add("sync/close_s", "seconds", "to commit")
_add("sync/pause_s", "seconds", "for which the engines were paused")
_add("sync/verify_s", "seconds", "of the probe in learner and engines, after the last load")

SFT = "sft/"
SFT_LOSS = _add("sft/loss", "nats per token", "supervised jobs; `step` is the optimizer's")
_add("sft/grad_norm", "", "before clipping")
_add("sft/lr", "", "learning rate")
_add("sft/num_steps", "steps", "of the optimizer in the whole job")
_add("sft/tokens_per_s", "tokens per second", "trained since the report before")
_add("sft/train_s", "seconds", "since the first step")

DPO = "dpo/"
DPO_PAIRS = _add("dpo/pairs", "pairs", "of the update")
DPO_TIES = _add("dpo/ties_share", "share of pairs", "left out because their rewards are equal")
_add("dpo/loss", "", "of the last optimizer step, see `actors.learner.dpo`")
_add("dpo/accuracy", "share of pairs", "of the last optimizer step")
_add("dpo/margin", "nats per pair", "of the last optimizer step")
_add("dpo/grad_norm", "", "of the last optimizer step")
_add("dpo/steps", "steps", "of the optimizer")
ILF_LOSS = _add("ilf/loss", "nats per token", "of fine-tuning")
ILF_REVISED = _add("ilf/revised_share", "share of responses", "with a revision")
ILF_FIXED = _add("ilf/fixed_share", "share of revisions", "imitated ones by fixes")
REFLECTION_REVISED = _add("reflection/revised_share", "share of responses", "held-out ones that were revised")
REFLECTION_S = _add("reflection/revise_s", "seconds", "of the revision")

HELD_OUT_SCORE = _add(
    "eval/score", "score per response", "selects the best checkpoint: the task's measure or the feedback's"
)
HELD_OUT_ERROR = _add(
    "eval/score_se", "score per response", "its standard error over prompts, where the task measures it"
)
HELD_OUT_FAILED = _add("eval/failed_share", "share of responses", "held-out, without usable feedback or a reply")
HELD_OUT_LENGTH = _add("eval/length_mean", "tokens", "of held-out responses")
_add("eval/<score>_turn_<n>", "score per response", "the measure after n turns, with an environment")
EVAL = _add("eval/<name>", "", "held-out metric of the task, only in steps that evaluate")

EARLIER_NAMES = {  # in the logs of runs of earlier versions
    "sync/hand_over_s": "sync/copy_to_core_s",
    "tokens/unlabelled_share": NEUTRAL_SHARE,
    "response/cut_share": TRUNCATED_SHARE,
    "reward/end_mean": OUTCOME_MEAN,
}

_LINE = (  # parts of a step's terminal line: metric and template
    (TOKEN_REWARD, "reward {:+.3f}"),
    (OUTCOME_MEAN, "outcome {:+.3f}"),
    (GOOD_SHARE, "good {:.1%}"),
    (POOR_SHARE, "poor {:.1%}"),
    (NEUTRAL_SHARE, "neutral {:.1%}"),
    (KL, "KL {:.3f}"),
    (ENTROPY, "entropy {:.3f}"),
    (CLIP_SHARE, "PPO-clipped {:.1%}"),
    (LENGTH, "length {:.1f}"),
    (TRUNCATED_SHARE, "truncated {:.1%}"),
    (UNANSWERED_SHARE, "unanswered {:.1%}"),
    (TURNS, "turns {:.2f}"),
    (GAP_MEAN, "gap {:.1e}"),
    (SPEED, "{:.0f} tokens/s"),
    (GENERATE_S, "generate {:.1f}s"),
    (FEEDBACK_S, "feedback {:.1f}s"),
    (LEARN_S, "learn {:.1f}s"),
    (SYNC_S, "sync {:.1f}s"),
)


def with_current_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a logged record, which a run of an earlier version may have written, with the names of today.

    >>> with_current_names({"step": 3, "sync/hand_over_s": 0.25})
    {'step': 3, 'sync/copy_to_core_s': 0.25}
    """
    return {EARLIER_NAMES.get(name, name): value for name, value in record.items()}


def pair_evaluations(steps: Iterable[Mapping[str, float | None]], name: str) -> list[tuple[float, float]]:
    """Return the mean training reward since the evaluation before, and a held-out metric, for each evaluation.

    The evaluation before the first training step is left out.
    """
    pairs = []
    rewards: list[float] = []
    for step in steps:
        reward = step.get(TOTAL_REWARD)
        if reward is not None:
            rewards.append(reward)
        value = step.get(name)
        if value is not None and rewards:
            pairs.append((fmean(rewards), value))
            rewards = []
    return pairs


def format_step(step: int, metrics: Mapping[str, float | None]) -> str:
    """Return the terminal line of a step; missing metrics are left out.

    >>> format_step(3, {"reward/token_mean": 0.0415, "policy/kl": 0.2, "eval/fact_f1": 0.71})
    'step 3 | reward +0.042 | KL 0.200 | eval fact_f1 0.710'
    """
    parts = [f"step {step}"]
    for name, template in _LINE:
        value = metrics.get(name)
        if value is not None:
            parts.append(template.format(value))
    parts += [f"eval {name} {value:.3f}" for name, value in select_held_out(metrics).items()]
    return " | ".join(parts)


def select_held_out(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the held-out metrics of a step, without their prefix."""
    held_out: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith(EVAL) and value is not None:
            held_out[name.removeprefix(EVAL)] = value
    return held_out
