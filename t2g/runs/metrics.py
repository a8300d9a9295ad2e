"""What a run writes down: names of the metrics, the line per step, metrics.jsonl, samples.jsonl, dropped.jsonl and
dashboards.

Metrics are flat, name -> number, one mapping per step. Shares lie in [0, 1].

| name                                       | what it is                                                             |
| ------------------------------------------ | ---------------------------------------------------------------------- |
| step                                       | number of the step, from 1; step 0 is the policy before any update     |
| samples                                    | responses sampled for training so far, all steps                       |
| reward/token_mean                          | mean token reward (delta) over the step's response tokens              |
| reward/response_mean                       | mean over responses of the sum of their token rewards                  |
| reward/end_mean                            | mean measure of the task, where objective.w_end pays it                |
| tokens/{good,poor,unlabelled}_share        | response tokens with delta > 0, < 0, = 0                               |
| policy/kl                                  | to the reference, nats per sequence: mean of the sum over tokens       |
| policy/kl_coef                             | beta of this step                                                      |
| policy/entropy                             | nats per token                                                         |
| policy/loss, critic/loss                   | mean over minibatches                                                  |
| policy/kl_loss                             | KL as a term of the loss (k3, full), before its coefficient, per token |
| policy/grad_norm, critic/grad_norm         | before clipping, mean over minibatches                                 |
| policy/clip_share                          | tokens whose ratio left [1 - eps, 1 + eps]                             |
| policy/approx_kl                           | old to new policy, k3, nats per token                                  |
| policy/ratio_max                           | largest probability ratio of a token, new by old                       |
| critic/clip_share                          | tokens on which the clipped value error is the larger one              |
| response/length_mean                       | sampled tokens, EOS included                                           |
| response/cut_share                         | responses that stopped at max_new_tokens                               |
| gap/{logprob_mean,p95}                     | of |learner - engine| logprob, nats                                    |
| importance/{mean,p95}                      | of the weight exp(learner - engine), before it is capped               |
| importance/outside_share                   | weights outside [.9, 1.1]                                              |
| importance/truncated_share                 | tokens whose weight objective.importance_cap changed                   |
| feedback/failed_share                      | responses whose feedback is neither ok nor empty                       |
| feedback/located_rate                      | quotes found in their response                                         |
| staleness/{mean,max}                       | updates between the weights that made a token and those it trains      |
| buffer/samples                             | judged responses that wait for a later step                            |
| dropped/samples                            | responses of the step not trained on: without feedback, or not sampled |
| dropped/prompts                            | prompts of the step that no rollout worker answered                    |
| idle/learner                               | share of time/step_s in which the learner had no call                  |
| idle/{rollout,reward}                      | share of the engines' time without a request, since the step before    |
| rollout/workers, reward/workers            | that serve, at the end of the step                                     |
| rollout/restarts, reward/restarts          | workers that were lost since the step before                           |
| rollout/recovery_s, reward/recovery_s      | the longest from a loss to the service of who took its place           |
| recovery/learner_s                         | from the loss of the learner until another had its place and weights   |
| speed/tokens_per_s                         | sampled tokens by seconds of the whole step                            |
| learner/tokens_per_s                       | packed tokens of all passes, prompts included, by seconds of the update |
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
| dpo/{loss,accuracy,margin,grad_norm,steps} | of the last optimizer step, see `learner.dpo`                           |
| ilf/{loss,revised_share}                   | of the fine-tuning; responses of which there is a revision             |
| reflection/{revised_share,revise_s}        | held-out responses that were answered again; the seconds it took       |
| eval/<name>                                | held-out metric of the task, only in steps that evaluate               |
| eval/score                                 | the one of them by which the best checkpoint is kept                   |
"""

import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Protocol

from t2g.config import LogConfig
from t2g.errors import UserError
from t2g.feedback import token_offsets
from t2g.files import full_disk_in_words, write_atomic
from t2g.types import Prompt, Rollout, ScoredRollout, SpanFeedback

STEP = "step"
SAMPLES = "samples"
TOKEN_REWARD = "reward/token_mean"
GOOD_SHARE = "tokens/good_share"
POOR_SHARE = "tokens/poor_share"
UNLABELLED_SHARE = "tokens/unlabelled_share"
KL = "policy/kl"
ENTROPY = "policy/entropy"
CLIP_SHARE = "policy/clip_share"
LENGTH = "response/length_mean"
GAP_MEAN = "gap/logprob_mean"
FAILED_SHARE = "feedback/failed_share"
TOKENS_PER_S = "speed/tokens_per_s"
GENERATE_S = "time/generate_s"
FEEDBACK_S = "time/feedback_s"
LEARN_S = "time/learn_s"
SYNC_S = "time/sync_s"
STEP_S = "time/step_s"
EVAL = "eval/"  # prefix

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
DROPPED_FILE = "dropped.jsonl"

_LINE = (  # parts of the line per step: metric and how it reads
    (TOKEN_REWARD, "reward {:+.3f}"),
    (GOOD_SHARE, "good {:.1%}"),
    (POOR_SHARE, "poor {:.1%}"),
    (UNLABELLED_SHARE, "unlabelled {:.1%}"),
    (KL, "KL {:.3f}"),
    (ENTROPY, "entropy {:.3f}"),
    (CLIP_SHARE, "clipped {:.1%}"),
    (LENGTH, "length {:.1f}"),
    (GAP_MEAN, "gap {:.1e}"),
    (TOKENS_PER_S, "{:.0f} tokens/s"),
    (GENERATE_S, "generate {:.1f}s"),
    (FEEDBACK_S, "feedback {:.1f}s"),
    (LEARN_S, "learn {:.1f}s"),
    (SYNC_S, "sync {:.1f}s"),
)


def step_line(step: int, metrics: Mapping[str, float | None]) -> str:
    """One line for the terminal; a metric that the step does not have is left out.

    >>> step_line(3, {"reward/token_mean": 0.0415, "policy/kl": 0.2, "eval/fact_f1": 0.71})
    'step 3 | reward +0.042 | KL 0.200 | eval fact_f1 0.710'
    """
    parts = [f"step {step}"]
    parts += [text.format(metrics[name]) for name, text in _LINE if metrics.get(name) is not None]
    parts += [f"eval {name} {value:.3f}" for name, value in held_out(metrics).items()]
    return " | ".join(parts)


def held_out(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The held-out metrics of one step, without their prefix."""
    found = ((name, value) for name, value in metrics.items() if name.startswith(EVAL))
    return {name.removeprefix(EVAL): value for name, value in found if value is not None}


class Sink(Protocol):
    """A dashboard."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """metrics.jsonl, samples.jsonl, dropped.jsonl and the dashboards of one run folder; durable when a call returns.

    `truncate` comes first. A number that is not finite stands as null in metrics.jsonl. UserError when the disk is
    full; the lines before are kept.
    """

    def __init__(self, folder: Path, config: LogConfig, extra_sinks: Sequence[Sink] = ()) -> None:
        if config.wandb_project is not None and find_spec("wandb") is None:
            raise UserError(
                f"log.wandb_project={config.wandb_project!r} needs the package wandb, which is not installed: "
                "install the extra `wandb`, or leave the field out"
            )
        self._folder = folder
        self._config = config
        self._sinks = [*extra_sinks]
        self._last_step = -1

    def truncate(self, first_step: int) -> list[dict[str, float | None]]:
        """Drop the lines of `first_step` and later and open the log; returns the metrics of the steps before, in order.

        Such lines come from a run that died after its last checkpoint: without this their steps would stand twice.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        history = _drop_steps(self._folder / METRICS_FILE, first_step)
        for name in (SAMPLES_FILE, DROPPED_FILE):
            _drop_steps(self._folder / name, first_step)
        self._last_step = first_step - 1
        if self._config.tensorboard:
            self._sinks.append(TensorBoardSink(self._folder / "tensorboard", first_step))
        if self._config.wandb_project is not None:
            self._sinks.append(WandbSink(self._config.wandb_project, self._folder))
        return history

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, and the same numbers to every dashboard."""
        assert step > self._last_step, f"step {step} was logged before"
        self._last_step = step
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        _append(self._folder / METRICS_FILE, [{STEP: step, **finite}])
        for sink in self._sinks:
            sink.log(step, metrics)

    def samples(
        self,
        step: int,
        judged: Sequence[tuple[Prompt, Rollout, SpanFeedback]],
        scored: Sequence[ScoredRollout],
        tokenizer: Any,
    ) -> None:
        """`log.num_samples` of a step's responses, evenly over its prompts; tokens only where feedback is usable."""
        count = min(self._config.num_samples, len(judged))
        chosen = [judged[i * len(judged) // count] for i in range(count)]
        by_key = {(s.rollout.prompt_id, s.rollout.sample_index): s for s in scored}
        records = []
        for prompt, rollout, feedback in chosen:
            record = _sample_record(step, "train", prompt, rollout, feedback)
            if found := by_key.get((rollout.prompt_id, rollout.sample_index)):
                ranges = token_offsets(tokenizer, rollout.response_ids).tolist()
                record |= {  # lists of length R: character range, text and reward (delta) of each response token
                    "token_ranges": ranges,
                    "token_texts": [rollout.response_text[start:end] for start, end in ranges],
                    "token_rewards": found.token_rewards.tolist(),
                }
            records.append(record)
        _append(self._folder / SAMPLES_FILE, records)

    def dropped(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """What of the step was not trained on; see `t2g.loop.sampling.dropped`."""
        _append(self._folder / DROPPED_FILE, [{STEP: step, **record} for record in records])

    def eval_samples(
        self, step: int, pairs: Sequence[tuple[Prompt, Rollout]], feedback: Sequence[SpanFeedback] = ()
    ) -> None:
        """The first `log.num_samples` held-out responses, the same prompts each time: the report's before and after.

        `feedback` is about the first of `pairs`; it may be shorter, evaluation by program needs none.
        """
        chosen = zip_longest(pairs[: self._config.num_samples], feedback[: self._config.num_samples])
        records = [_sample_record(step, "eval", prompt, rollout, judged) for (prompt, rollout), judged in chosen]
        _append(self._folder / SAMPLES_FILE, records)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class TensorBoardSink:
    """Event files; points of `first_step` and later, left by a run that died, are hidden."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with full_disk_in_words(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases; a resumed run goes on under the id kept in its folder. It refuses to log a step again: the
    dashboard keeps the first numbers of the steps that a run repeats after a crash, metrics.jsonl the second."""

    def __init__(self, project: str, folder: Path) -> None:
        import wandb

        id_file = folder / "wandb_id"
        if not id_file.exists():
            write_atomic(id_file, uuid.uuid4().hex.encode())
        self._run = wandb.init(
            project=project, name=folder.name, dir=str(folder), id=id_file.read_text(), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and record of each line of a JSON-lines file that a RunLog wrote; none for a missing file.

    A last line that a crash cut off is left out. Raises UserError for any other line that is no JSON object with
    a step.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        broken_at = None
        for number, line in enumerate(file, start=1):
            if broken_at is not None:
                raise UserError(f"{path}:{broken_at} is no JSON object with a step, and it is not the last line")
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and isinstance(record.get(STEP), int):
                yield number, record
            else:
                broken_at = number


def _drop_steps(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Keep the whole lines of steps before `first_step`, and return them."""
    kept = [record for _, record in read_records(path) if record[STEP] < first_step]
    write_atomic(path, "".join(f"{json.dumps(record)}\n" for record in kept).encode())
    return kept


def _append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add lines and bring them to the disk; json.dumps escapes what is not ASCII, lone surrogates included."""
    with full_disk_in_words(path), path.open("a", encoding="ascii") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


def _sample_record(
    step: int, split: Literal["train", "eval"], prompt: Prompt, rollout: Rollout, feedback: SpanFeedback | None
) -> dict[str, Any]:
    return {
        STEP: step,
        "split": split,
        "prompt_id": prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "prompt": prompt.prompt_text,
        "response": rollout.response_text,
        "finish_reason": rollout.finish_reason,
        "feedback": None if feedback is None else asdict(feedback),
    }
