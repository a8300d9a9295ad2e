"""A trainer on fakes in one run folder; making a second one there is what a restart is."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes import FakeFeedback, FakeLearner, FakeRollouts, FakeSync, LetterTask, letter_prompts
from registered_metrics import assert_registered

from t2g.config import PolicyJob
from t2g.loop.steps import select_prompts
from t2g.loop.trainer import Trainer, TrainerState
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity
from t2g.runs.judgements import JournaledFeedback
from t2g.runs.log import RunLog

NUM_STEPS = 6
NUM_PROMPTS = 20
PER_STEP = 8  # two steps an epoch
MEASURED_IN_TIME = ("time/", "speed/", "idle/", "recovery/")


def job(
    *, noise: dict[str, float] | None = None, samples_per_prompt: int = 4, max_staleness: int = 0, **objective: Any
) -> PolicyJob:
    return PolicyJob.model_validate(
        {
            "model": {"policy": "unused"},
            "data": {"path": "unused"},
            "num_steps": NUM_STEPS,
            "rollout": {
                "prompts_per_step": PER_STEP,
                "samples_per_prompt": samples_per_prompt,
                "max_staleness": max_staleness,
            },
            "feedback": {"source": "pkg:judge", "noise": noise},
            "objective": {"kl_coef": 0.01, **objective},
            "learner": {"minibatches_per_epoch": 2},
            "eval": {"every": 3},
            "checkpoint": {"every": 2},
            "log": {"trackers": []},
        }
    )


def task_reward(weight: float = 1.0) -> list[dict[str, Any]]:
    """The outcome rewards of a run that pays the task's measure."""
    return [{"source": "task", "weight": weight}]


def chosen(step: int) -> list[str]:
    """The ids of a step's prompts."""
    indices = select_prompts(num_prompts=NUM_PROMPTS, per_step=PER_STEP, step=step, seed=1)
    return [f"p{i}" for i in indices]


class Bench:
    """`run` fails when anything that it began still runs at its end."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        config: PolicyJob,
        stop: Callable[[], bool] = lambda: False,
        *,
        rollouts: FakeRollouts | None = None,
        judgement_cache_key: str = "",
        **options: Any,
    ) -> None:
        self.folder = folder
        self.rollouts = rollouts or FakeRollouts(tokenizer)
        self.feedback = FakeFeedback()
        self.feedback.judgement_cache_key = judgement_cache_key
        self.journaled = journaled = JournaledFeedback(self.feedback, folder, Identity.from_config(config), keep=2)
        self.learner = FakeLearner(self.rollouts)
        self.task = LetterTask()
        identity = Identity.from_config(config)
        sync = FakeSync(self.learner, self.rollouts)
        data = {"prompts": letter_prompts(NUM_PROMPTS), "eval_prompts": letter_prompts(40, "held-out-")}
        files = {"log": RunLog(folder, config.log), "checkpoints": CheckpointStore(folder / "checkpoints", keep=2)}
        hooks = {"on_checkpoint": journaled.start_file, "stop": stop, "extra_metrics": self.extra_metrics}
        self.trainer = Trainer(
            config=config,
            task=self.task,
            tokenizer=tokenizer,
            rollouts=self.rollouts,
            feedback=journaled,
            learner=self.learner,
            sync=sync,
            identity=identity,
            **data,
            **files,
            **hooks,
            **options,
        )

    async def extra_metrics(self) -> dict[str, float]:
        return {}

    def run(self) -> TrainerState:
        return asyncio.run(self.tidy())

    async def tidy(self) -> TrainerState:
        before = asyncio.all_tasks()
        try:
            self.journaled.start_file(self.trainer.resume().step)
            state = await self.trainer.run()
            assert_registered(self.folder)
            return state
        finally:
            assert asyncio.all_tasks() == before and self.rollouts.num_running == 0

    def metrics(self) -> list[dict[str, float]]:
        """Without what is measured in time."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        steps = []
        for line in lines:
            metrics = json.loads(line)
            steps.append({name: value for name, value in metrics.items() if not name.startswith(MEASURED_IN_TIME)})
        return steps

    def dropped(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "dropped.jsonl").read_text().splitlines()]

    def alarms(self, text: str) -> list[int]:
        """Return the steps with an alarm that contains `text`."""
        file = self.folder / "alarms.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        alarms = [json.loads(line) for line in lines]
        return [alarm["step"] for alarm in alarms if text in alarm["alarm"]]

    def checkpoint_step(self) -> int | None:
        latest = self.trainer.checkpoints.latest()
        return latest and latest[1]["step"]
