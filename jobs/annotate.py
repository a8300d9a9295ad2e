"""Stage 1: sample a policy on a data set, criticise every response, write annotated records for jobs.train_reward.

    python -m jobs.annotate --config configs/tiny/annotate.yaml model.policy=my/model data.path=my.jsonl
"""

import asyncio
import sys
from typing import TYPE_CHECKING

from jobs.cli import main
from t2g import configio
from t2g.config import AnnotateJob
from t2g.describe import describe_annotate
from t2g.errors import RunStopped, UserError

if TYPE_CHECKING:
    from jobs.fleets import Fleets

TRAIN_FILE, HELDOUT_FILE = "train.jsonl", "heldout.jsonl"


def annotate_data(config: AnnotateJob, fleets: "Fleets") -> dict[str, float]:
    """Records of every prompt into the run folder, split by prompt. Returns counts and shares.

    Records without usable feedback are counted, not written; RunStopped when there are more than
    `feedback.max_failed_share`.
    """
    from t2g.annotate import annotate, is_heldout
    from t2g.data.chat import load_tokenizer
    from t2g.data.load import load_records
    from t2g.data.prompts import make_prompts
    from t2g.data.records import write_annotated
    from t2g.interfaces import Sampling
    from t2g.progress import stage
    from t2g.tasks.base import get_task

    rollout = config.rollout
    tokenizer = load_tokenizer(config.model.policy, config.model.revision)
    room = rollout.max_model_len - rollout.max_new_tokens
    task = get_task(config.task)
    prompts = make_prompts(load_records(config.data), task, tokenizer, room)
    sampling = Sampling(
        num_samples=rollout.samples_per_prompt,
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        seed=config.run.seed,
    )
    rollouts = fleets.rollouts(config.model, rollout, config)
    feedback = fleets.feedback(config.feedback, task, config)
    with stage("annotate", len(prompts) * sampling.num_samples) as bar:
        records = asyncio.run(annotate(prompts, sampling, rollouts, feedback, lambda record: bar.advance()))
    usable = [record for record in records if record.status in ("ok", "empty")]
    failed_share = 1 - len(usable) / len(records)
    if failed_share > config.feedback.max_failed_share:
        raise RunStopped(
            f"{failed_share:.0%} of {len(records)} responses got no usable feedback from {feedback.name}; "
            f"feedback.max_failed_share allows {config.feedback.max_failed_share:.0%}"
        )
    parts = {name: [r for r in usable if is_heldout(r.prompt_id, config.heldout_share) is held]
             for name, held in ((TRAIN_FILE, False), (HELDOUT_FILE, True))}  # fmt: skip
    for name, part in parts.items():
        if not part:
            raise UserError(
                f"no record for {name}: {len(prompts)} prompts are too few for heldout_share={config.heldout_share}"
            )
        write_annotated(config.run.folder / name, part)
    return {
        "train_records": len(parts[TRAIN_FILE]),
        "heldout_records": len(parts[HELDOUT_FILE]),
        "failed_share": failed_share,
        "spans_per_response": sum(len(r.spans or ()) for r in usable) / len(usable),
    }


def run(config: AnnotateJob) -> None:
    import ray

    from actors.placement import connect
    from jobs.fleets import Fleets, feedback_roles

    folder = config.run.folder
    if (folder / TRAIN_FILE).exists():
        configio.check_resumable(config, folder)
        print(f"{folder} is already annotated with this config: kept")
        return
    configio.write(config, folder)
    connect(config.cluster, {"rollout": config.rollout} | feedback_roles(config.feedback))
    try:
        with Fleets() as fleets:
            print(annotate_data(config, fleets))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(AnnotateJob, run, describe_annotate))
