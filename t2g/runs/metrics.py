"""What a run measures: the names, and the line per step. `t2g.runs.log` writes them down.

Metrics are flat, name -> number, one mapping per step. Shares lie in [0, 1].

| name                                       | what it is                                                             |
| ------------------------------------------ | ---------------------------------------------------------------------- |
| step                                       | number of the step, from 1; step 0 is the policy before any update     |
| samples                                    | responses sampled for training so far, all steps                       |
| reward/token_mean                          | mean reward of the step's response tokens: spans, truncation penalty   |
| reward/response_mean                       | mean over responses of the sum of their token rewards                  |
| reward/outcome_mean                        | mean measure of the task, where objective.outcome_rewards is above 0   |
| tokens/{good,poor,neutral}_share           | response tokens in spans worth > 0, < 0, and all others                |
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
| teacher/share                              | responses whose critique objective.teacher has read                    |
| teacher/gap_mean                           | of |teacher - policy| logprob, nats                                    |
| critic/clip_share                          | tokens whose PPO-clipped value error is the larger one                 |
| response/length_mean                       | sampled tokens, EOS included                                           |
| response/truncated_share                   | responses that max_new_tokens truncated                                |
| gap/{logprob_mean,p95}                     | of |learner - engine| logprob, nats                                    |
| importance/{mean,p95}                      | of the weight exp(learner - engine), before it is capped               |
| importance/outside_share                   | weights outside [.9, 1.1]                                              |
| importance/truncated_share                 | tokens whose weight rollout_correction_cap changed                     |
| feedback/failed_share                      | responses whose feedback is neither ok nor empty                       |
| feedback/located_rate                      | quotes found in their response                                         |
| feedback/recall_                           | and a class of faults that the task knows: how many are called poor    |
| feedback/faults_praised                    | faults that it calls good                                              |
| staleness/{mean,max}                       | updates between the weights that made a token and those it trains      |
| buffer/samples                             | judged responses that wait for a later step                            |
| dropped/samples                            | responses of the step not trained on: without feedback, or not sampled |
| dropped/prompts                            | prompts of the step that no rollout worker answered                    |
| idle/learner                               | share of time/step_s in which the learner had no call                  |
| idle/{rollout,reward}                      | share of the engines' time without a request, since the step before    |
| rollout/workers, reward/workers            | that serve, at the end of the step                                     |
| rollout/restarts, reward/restarts          | workers that were lost since the step before                           |
| rollout/recovery_s, reward/recovery_s      | the longest from a loss to the service of who took its place           |
| rollout/tokens_per_s, reward/tokens_per_s  | that vLLM generated, by the seconds in which an engine had a request   |
| {rollout,reward}/queued                    | requests inside an engine without a slot, mean over its own steps      |
| {rollout,reward}/cache_use                 | largest share of an engine's KV cache in use                           |
| {rollout,reward}/preemptions               | requests that lost their cache to others, and were computed again      |
| recovery/learner_s                         | from the loss of the learner until another had its place and weights   |
| speed/tokens_per_s                         | sampled tokens by seconds of the whole step                            |
| learner/tokens_per_s                       | tokens of all passes, prompts included, by seconds of the update       |
| learner/peak_memory_gib                    | most of a rank: of its GPU in this update, of a process on a CPU       |
| policy/mfu, critic/mfu                     | model FLOPs by those of the GPUs in bfloat16; not on a CPU             |
| learner/optimizer_steps                    | minibatches of this step                                               |
| time/{generate,feedback}_s                 | seconds that the step waited for responses, then for the last feedback |
| time/{learn,sync}_s                        | seconds of update and weight sync                                      |
| time/{step,eval}_s                         | seconds of the whole step without its evaluation, and of that          |
| sync/probe_gap                             | largest |engine - learner| logprob on the probe, nats                  |
| sync/bytes                                 | weights sent to each worker                                            |
| sync/{gather,hand_over,load}_s             | seconds of work on all buckets; they overlap                           |
| sync/{open,close}_s                        | seconds to pause engines and announce a version, and to commit it      |
| sync/verify_s                              | seconds of the probe after the last load, in learner and engines       |
| sync/calls                                 | calls of workers and of the learner group                              |
| sync/missed                                | workers that were sent the weights and did not get them                |
| sft/<name>                                 | supervised jobs: loss, gradient norm, speed; `step` is the optimizer's |
| dpo/{pairs,ties_share}                     | pairs learnt from; share left out since both are worth the same        |
| dpo/{loss,accuracy,margin,grad_norm,steps} | of the last optimizer step, see `actors.learner.dpo`                   |
| ilf/{loss,revised_share}                   | of the fine-tuning; responses of which there is a revision             |
| reflection/{revised_share,revise_s}        | held-out responses that were answered again; the seconds it took       |
| eval/<name>                                | held-out metric of the task, only in steps that evaluate               |
| eval/score                                 | the one of them by which the best checkpoint is kept                   |
"""

from collections.abc import Mapping

STEP = "step"
SAMPLES = "samples"
TOKEN_REWARD = "reward/token_mean"
NEUTRAL_SHARE = "tokens/neutral_share"
KL = "policy/kl"
ENTROPY = "policy/entropy"
LENGTH = "response/length_mean"
TRUNCATED_SHARE = "response/truncated_share"
FAILED_SHARE = "feedback/failed_share"
RECALL = "feedback/recall_"  # prefix
EVAL = "eval/"  # prefix

_LINE = (  # parts of the line per step: metric and how it reads
    (TOKEN_REWARD, "reward {:+.3f}"),
    ("tokens/good_share", "good {:.1%}"),
    ("tokens/poor_share", "poor {:.1%}"),
    (NEUTRAL_SHARE, "neutral {:.1%}"),
    (KL, "KL {:.3f}"),
    (ENTROPY, "entropy {:.3f}"),
    ("policy/clip_share", "PPO-clipped {:.1%}"),
    (LENGTH, "length {:.1f}"),
    (TRUNCATED_SHARE, "truncated {:.1%}"),
    ("gap/logprob_mean", "gap {:.1e}"),
    ("speed/tokens_per_s", "{:.0f} tokens/s"),
    ("time/generate_s", "generate {:.1f}s"),
    ("time/feedback_s", "feedback {:.1f}s"),
    ("time/learn_s", "learn {:.1f}s"),
    ("time/sync_s", "sync {:.1f}s"),
)


def format_step(step: int, metrics: Mapping[str, float | None]) -> str:
    """One line for the terminal; a metric that the step does not have is left out.

    >>> format_step(3, {"reward/token_mean": 0.0415, "policy/kl": 0.2, "eval/fact_f1": 0.71})
    'step 3 | reward +0.042 | KL 0.200 | eval fact_f1 0.710'
    """
    parts = [f"step {step}"]
    parts += [text.format(metrics[name]) for name, text in _LINE if metrics.get(name) is not None]
    parts += [f"eval {name} {value:.3f}" for name, value in select_held_out(metrics).items()]
    return " | ".join(parts)


def select_held_out(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The held-out metrics of one step, without their prefix."""
    found = ((name, value) for name, value in metrics.items() if name.startswith(EVAL))
    return {name.removeprefix(EVAL): value for name, value in found if value is not None}
