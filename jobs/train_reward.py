"""Stage 2: the span reward model learns [critique; span map] from annotated records, then is measured on held-out ones.

    python -m jobs.train_reward --config configs/own/reward.yaml model.policy=my/model \
        data.path=runs/annotated/train.jsonl eval_data.path=runs/annotated/heldout.jsonl

Leaves `<run folder>/model`, metrics.jsonl and reward.json (see `t2g.reward_eval.reward_metrics`). run.smoke=true does
the same with three steps in the folder `smoke`.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.cli import main
from jobs.train_sft import LEFTOVERS, MODEL, check_folder, supervise, work_folder
from t2g.checkpoint import write_atomic
from t2g.config import FeedbackConfig, RewardJob
from t2g.describe import describe_reward
from t2g.errors import UserError

if TYPE_CHECKING:
    from actors.reward import RewardFleet
    from jobs.fleets import Fleets
    from t2g.data.records import AnnotatedRecord
    from t2g.data.sft import SFTExample
    from t2g.reward_eval import JudgedRecord

REPORT_FILE = "reward.json"


@dataclass(frozen=True, kw_only=True)
class RewardData:
    """What the job reads before any process is started, so that bad input is refused in a second."""

    tokenizer: Any
    examples: "list[SFTExample]"
    heldout: "list[AnnotatedRecord]"


def read_data(config: RewardJob) -> RewardData:
    """Examples and held-out records. UserError for what cannot be used."""
    from t2g.data.chat import load_tokenizer
    from t2g.data.records import load_annotated
    from t2g.data.sft import USABLE, reward_examples
    from t2g.tasks.base import get_task

    tokenizer = load_tokenizer(config.model.policy, config.model.revision)
    heldout = [record for record in load_annotated(config.eval_data) if record.status in USABLE][: config.eval_records]
    if not heldout:
        raise UserError(f"eval_data.path={config.eval_data.path} has no record with feedback that could be used")
    examples = reward_examples(
        load_annotated(config.data), get_task(config.task), tokenizer,
        max_length=config.sft.max_length, span_weight=config.sft.span_weight,
    )  # fmt: skip
    return RewardData(tokenizer=tokenizer, examples=examples, heldout=heldout)


def train_reward(config: RewardJob, data: RewardData, fleets: "Fleets", *, tokenizer: Any) -> dict[str, float]:
    """Train and measure on the Ray that is connected; returns what stands in reward.json.

    tokenizer: on whose tokens spans are compared.
    """
    supervise(config, data.examples, title="span reward model")
    folder = work_folder(config.run)
    metrics = evaluate_reward(config, folder / MODEL, data.heldout, fleets, tokenizer)
    write_atomic(folder / REPORT_FILE, json.dumps(metrics, indent=1).encode())
    return metrics


def evaluate_reward(
    config: RewardJob, model: Path, records: "Sequence[AnnotatedRecord]", fleets: "Fleets", tokenizer: Any
) -> dict[str, float]:
    """Serve the model folder with vLLM and compare its spans with those of `records` on `tokenizer`'s tokens."""
    from t2g.tasks.base import get_task

    served = FeedbackConfig(source="reward_model", reward_model=str(model), engine=config.engine)
    return asyncio.run(measure(fleets.rewards(served, get_task(config.task), config), records, tokenizer))


async def measure(fleet: "RewardFleet", records: "Sequence[AnnotatedRecord]", tokenizer: Any) -> dict[str, float]:
    """`reward_metrics` of what the served model says about the records' responses."""
    from t2g.progress import stage
    from t2g.reward_eval import reward_metrics

    with stage("measuring the reward model", len(records)) as bar:

        async def one(record: "AnnotatedRecord") -> "JudgedRecord":
            judged = await _judge(fleet, record, tokenizer)
            bar.advance()
            return judged

        return reward_metrics(await asyncio.gather(*(one(record) for record in records)))


async def _judge(fleet: "RewardFleet", record: "AnnotatedRecord", tokenizer: Any) -> "JudgedRecord":
    """Twice: guided for the spans, as in training, and free for the parse rate, which guiding would make 1."""
    from t2g.reward_eval import judged_record

    prompt = record.to_prompt()
    guided, free = await asyncio.gather(
        fleet.judge(prompt, record.response), fleet.judge_unguided(prompt, record.response)
    )
    return judged_record(record.response, record.to_feedback(), guided, free, tokenizer)


def run(config: RewardJob) -> None:
    from actors.placement import connect
    from jobs.fleets import Fleets

    check_folder(config, *LEFTOVERS)
    data = read_data(config)
    connect(config.cluster, {"sft": config.sft})  # the engine starts when the ranks have gone
    with Fleets() as fleets:
        metrics = train_reward(config, data, fleets, tokenizer=data.tokenizer)
    print(" ".join(f"{name} {value:.3f}" for name, value in metrics.items()))


if __name__ == "__main__":
    sys.exit(main(RewardJob, run, describe_reward))
