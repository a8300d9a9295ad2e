"""The calls. Each runs the job that the command of its name runs."""

import json
from typing import Any

from jobs.annotate.annotation_job import READ_SAMPLES, complete_annotation
from jobs.api.job_start import GivenConfig, Records, start
from jobs.evaluate.evaluations import EVALUATIONS
from jobs.train_policy.policy_job import READ_DATA, PolicyRun, check_start, run_training
from t2g.config import AnnotateJob, PolicyJob
from t2g.errors import UserError


# ------------------------------------------------------------------------------------------------------------ training
def train(
    config: GivenConfig, *, prompts: Records | None = None, eval_prompts: Records | None = None, feedback: Any = None
) -> PolicyRun:
    """Train a policy by span-level PPO, or resume the run in the folder `run.root`/`run.name`.

    Args:
        config: A PolicyJob, a dict of its keys or the path of a YAML file. A function may stand where a key takes an
            import path, `pkg.mod:function`.
        prompts: Dicts or a `datasets.Dataset`, in place of `data.path`; the run folder keeps them.
        eval_prompts: The same for `eval_data.path`.
        feedback: Feedback function, async or not, or its import path; in place of `feedback.source`.

    Raises:
        UserError, RunStopped, Stopped, KeyboardInterrupt: See `start`.
    """
    inputs = {"data.path": prompts, "eval_data.path": eval_prompts, "feedback.source": feedback}
    return start(PolicyJob, run_training, READ_DATA, config, inputs, check=check_start)


# ---------------------------------------------------------------------------------------------------------- annotation
def annotate(config: GivenConfig, *, prompts: Records | None = None, feedback: Any = None) -> list[dict[str, Any]]:
    """Judge responses, or resume the run in the folder `run.root`/`run.name`; return the records of annotated.jsonl.

    Args:
        config: An AnnotateJob, a dict of its keys or the path of a YAML file; see `train`.
        prompts: Dicts with prompts and, unless `annotate.responses=policy`, responses; in place of `data.path`.
        feedback: Feedback function, or its import path; in place of `annotate.source`.

    Raises:
        UserError, RunStopped, Stopped, KeyboardInterrupt: See `start`.
    """
    inputs = {"data.path": prompts, "annotate.source": feedback}
    file = start(AnnotateJob, complete_annotation, READ_SAMPLES, config, inputs)
    return [json.loads(line) for line in file.read_bytes().splitlines()]


# ---------------------------------------------------------------------------------------------------------- evaluation
def evaluate(config: GivenConfig, *, what: str = "reward", prompts: Records | None = None) -> dict[str, Any]:
    """Measure a reward model, policies or a teacher on held-out data; return the numbers.

    Args:
        config: A config of the job that `what` names, a dict of its keys or the path of a YAML file; see `train`.
        what: reward, policy or teacher, as of `t2g evaluate --what`.
        prompts: Dicts or a `datasets.Dataset`, in place of `data.path`.

    Raises:
        UserError, RunStopped, Stopped, KeyboardInterrupt: See `start`.
    """
    if what not in EVALUATIONS:
        raise UserError(f"what={what!r} is none of {', '.join(EVALUATIONS)}")
    return start(*EVALUATIONS[what], config, {"data.path": prompts})
