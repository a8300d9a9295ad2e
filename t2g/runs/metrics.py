"""Names of the metrics of a run, and the terminal line of a step. `t2g.runs.log` writes them.

Metrics are flat, name -> number, one mapping per step. Shares lie in [0, 1].

| name                                       | what it is                                                             |
| ------------------------------------------ | ---------------------------------------------------------------------- |
| step                                       | number of the step, from 1; step 0 is the policy before any update     |
| samples                                    | responses sampled for training so far, all steps                       |
| reward/token_mean                          | mean reward of the step's response tokens: spans, truncation penalty   |
| reward/response_mean                       | mean over responses of the sum of their token rewards                  |
| reward/outcome_mean                        | mean weighted sum of objective.outcome_rewards, if there are any       |
| reward/outcome/<source>                    | mean of one of them before its weight, where it applies                |
| reward/total_mean                          | mean over responses: span_coef x spans + penalty + outcome rewards     |
| tokens/{good,poor,neutral}_share           | answer tokens in spans worth > 0, < 0, and all others                  |
| policy/kl                                  | to the reference, nats per sequence: mean of the sum over tokens       |
| policy/kl_coef                             | beta of this step                                                      |
| policy/entropy                             | nats per token                                                         |
| policy/loss, critic/loss                   | mean over minibatches                                                  |
| policy/kl_loss                             | KL as a term of the loss (k3, full), before its coefficient, per token |
| policy/grad_norm, critic/grad_norm         | before clipping, mean over minibatches                                 |
| policy/lr, critic/lr                       | learning rate, mean over minibatches                                   |
| policy/{accuracy,margin}                   | of pairs of responses, see `t2g.algo.losses.dpo_loss`                  |
| policy/clip_share                          | PPO-clipped tokens: their ratio left [1 - eps, 1 + eps]                |
| policy/approx_kl                           | old to new policy, k3, nats per token                                  |
| policy/ratio_max                           | largest probability ratio of a token, new by old                       |
| teacher/share                              | share of responses with a critique for objective.teacher               |
| teacher/gap_{good,poor,poor_first}         | teacher - policy logprob of tokens in good spans, in poor spans, and   |
|                                            | of the first token of each poor run, nats                              |
| teacher/contrast                           | min(0, gap_good) - gap_poor_first; below 0: the teacher will not help  |
| teacher/kl                                 | KL(policy || teacher), nats, mean over tokens; 0 without a critique    |
| critic/clip_share                          | tokens whose clipped value error is larger than the unclipped one      |
| response/length_mean                       | sampled tokens, EOS included                                           |
| response/truncated_share                   | responses that max_new_tokens truncated                                |
| response/unanswered_share                  | responses that end within their thinking; only of models that think    |
| turns/mean                                 | of the policy in a conversation, with an environment                   |
| turns/window_share                         | conversations that ended because rollout.max_model_len was full        |
| turns/unpaid_share                         | share of spans on the environment's text alone, which pay nothing      |
| gap/{logprob_mean,p95}                     | of |learner - engine| logprob, nats                                    |
| importance/{mean,p95}                      | weight exp(learner - engine) logprob, before the cap                   |
| importance/outside_share                   | weights outside [.9, 1.1]                                              |
| importance/truncated_share                 | tokens whose weight rollout_correction_cap changed                     |
| feedback/failed_share                      | responses whose feedback is neither ok nor empty                       |
| feedback/empty_share                       | responses that were judged, and have no span                           |
| feedback/source/<name>                     | share of the responses that this source judged                         |
| sandbox/<mode>_share                       | share of the code responses whose tests ran in this mode               |
| criterion_reward/                          | + criterion: mean over responses of the sum of its token rewards       |
| criterion_failed/                          | + criterion: responses without usable feedback of it                   |
| feedback/located_rate                      | quotes found in their response                                         |
| feedback/metrics/<name>                    | metric of the feedback function, mean over the responses that have it  |
| feedback/metrics/at_max_spans              | reward model's answers with engine.max_spans good or poor quotes       |
| feedback/recall_                           | + fault class of the task: share of its faults that overlap poor spans |
| feedback/faults_praised                    | share of the task's faults that overlap good spans                     |
| staleness/{mean,max}                       | updates between the weights that sampled a token and those it trains   |
| buffer/samples                             | judged responses of later steps                                        |
| dropped/samples                            | responses of the step without usable feedback, or not sampled          |
| dropped/prompts                            | prompts of the step that no rollout worker could answer                |
| idle/learner                               | share of time/step_s in which the learner had no call                  |
| idle/{rollout,reward}                      | share of the engines' time without a request, since the step before    |
| rollout/workers, reward/workers            | workers that serve at the end of the step                              |
| rollout/restarts, reward/restarts          | workers that failed since the step before                              |
| rollout/recovery_s, reward/recovery_s      | longest time from a failure until the replacement serves               |
| rollout/tokens_per_s, reward/tokens_per_s  | tokens generated by vLLM per second with a request                     |
| {rollout,reward}/queued                    | requests that wait for a slot in an engine, mean over engine steps     |
| {rollout,reward}/cache_use                 | largest share of an engine's KV cache in use                           |
| {rollout,reward}/preemptions               | requests that vLLM preempted and computed again                        |
| recovery/learner_s                         | from the failure of the learner until its replacement has the weights  |
| speed/tokens_per_s                         | sampled tokens by seconds of the whole step                            |
| learner/tokens_per_s                       | tokens of all passes, prompts included, by seconds of the update       |
| learner/peak_memory_gib                    | largest peak of a rank: GPU memory of this update, or process on a CPU |
| policy/mfu, critic/mfu                     | model FLOPs by those of the GPUs in bfloat16; not on a CPU             |
| learner/optimizer_steps                    | minibatches of this step                                               |
| time/{generate,feedback}_s                 | seconds that the step waits for responses, then for the last feedback  |
| time/{learn,sync}_s                        | seconds of update and weight sync                                      |
| time/{step,eval}_s                         | seconds of the step without its evaluation, and of the evaluation      |
| sync/probe_gap                             | largest |engine - learner| logprob on the probe, nats                  |
| sync/bytes                                 | weights sent to each worker                                            |
| sync/{gather,hand_over,load}_s             | seconds of work on all buckets; they overlap                           |
| sync/{open,close}_s                        | seconds to pause engines and send the manifest, and to commit          |
| sync/pause_s                               | seconds for which the engines were paused                              |
| sync/verify_s                              | seconds of the probe in learner and engines, after the last load       |
| sync/calls                                 | calls of workers and of the learner group                              |
| sync/missed                                | workers that failed to get the weights                                 |
| sft/<name>                                 | supervised jobs: loss, gradient norm, speed; `step` is the optimizer's |
| dpo/{pairs,ties_share}                     | pairs of the update; share left out because their rewards are equal    |
| dpo/{loss,accuracy,margin,grad_norm,steps} | metrics of the last optimizer step, see `actors.learner.dpo`           |
| ilf/{loss,revised_share,fixed_share}       | loss of fine-tuning; responses with a revision; imitated ones by fixes |
| reflection/{revised_share,revise_s}        | share of held-out responses that were revised; seconds of the revision |
| eval/<name>                                | held-out metric of the task, only in steps that evaluate               |
| eval/<score>_turn_<n>                      | the measure after n turns, with an environment                         |
| eval/score                                 | the metric that selects the best checkpoint                            |
| eval/score_se                              | its standard error over prompts, where the task measures the score     |
| eval/failed_share                          | held-out responses without a score: no usable feedback, no reply       |
"""

from collections.abc import Iterable, Mapping
from statistics import fmean

STEP = "step"
SAMPLES = "samples"
TOKEN_REWARD = "reward/token_mean"
TOTAL_REWARD = "reward/total_mean"
OUTCOME_MEAN = "reward/outcome_mean"
OUTCOME_REWARD = "reward/outcome/"  # prefix
NEUTRAL_SHARE = "tokens/neutral_share"
KL = "policy/kl"
ENTROPY = "policy/entropy"
LENGTH = "response/length_mean"
TURNS = "turns/mean"
TRUNCATED_SHARE = "response/truncated_share"
UNANSWERED_SHARE = "response/unanswered_share"
FAILED_SHARE = "feedback/failed_share"
LOCATED_RATE = "feedback/located_rate"
TEACHER_CONTRAST = "teacher/contrast"
TEACHER_SHARE = "teacher/share"
RECALL = "feedback/recall_"  # prefix
FEEDBACK_METRICS = "feedback/metrics/"  # prefix
CRITERION_REWARD = "criterion_reward/"  # prefix
CRITERION_FAILED = "criterion_failed/"  # prefix
EVAL = "eval/"  # prefix
HELD_OUT_SCORE = "eval/score"
HELD_OUT_ERROR = "eval/score_se"

_LINE = (  # parts of a step's terminal line: metric and template
    (TOKEN_REWARD, "reward {:+.3f}"),
    (OUTCOME_MEAN, "outcome {:+.3f}"),
    ("tokens/good_share", "good {:.1%}"),
    ("tokens/poor_share", "poor {:.1%}"),
    (NEUTRAL_SHARE, "neutral {:.1%}"),
    (KL, "KL {:.3f}"),
    (ENTROPY, "entropy {:.3f}"),
    ("policy/clip_share", "PPO-clipped {:.1%}"),
    (LENGTH, "length {:.1f}"),
    (TRUNCATED_SHARE, "truncated {:.1%}"),
    (UNANSWERED_SHARE, "unanswered {:.1%}"),
    (TURNS, "turns {:.2f}"),
    ("gap/logprob_mean", "gap {:.1e}"),
    ("speed/tokens_per_s", "{:.0f} tokens/s"),
    ("time/generate_s", "generate {:.1f}s"),
    ("time/feedback_s", "feedback {:.1f}s"),
    ("time/learn_s", "learn {:.1f}s"),
    ("time/sync_s", "sync {:.1f}s"),
)


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
