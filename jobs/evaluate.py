"""How good is what was trained, on held-out data? A report that one can believe: figures with intervals, and errors.

    python -m jobs.evaluate --what reward --config configs/own/evaluate.yaml \
        feedback.reward_model=runs/own-reward/model data.path=runs/own-annotated/heldout.jsonl

Serves the reward model as PPO does and leaves evaluation.json and evaluation.html in the run folder. Spans are compared
on the tokens of the reward model's own tokenizer. run.smoke=true does the same with three records.
"""

import sys
from collections.abc import Sequence

from jobs.common.cli import main
from jobs.common.run_folder import begin_folder
from t2g.config import EvaluateJob


def evaluate(argv: Sequence[str] | None = None) -> int:
    what = {"choices": ["reward"], "default": "reward", "help": "what is evaluated"}
    return main(EvaluateJob, run, argv=argv, options={"--what": what})


def run(config: EvaluateJob, what: str) -> None:
    from jobs.common.reward_models import as_trained, connected_model, evaluate_reward, usable_records
    from t2g.report.reward_page import JSON_FILE
    from t2g.text.tokenizer import load_tokenizer

    asked = as_trained(config)
    records = usable_records("data.path", asked.data, asked.task)
    tokenizer = load_tokenizer(str(asked.feedback.reward_model), asked.feedback.reward_revision)  # its own
    folder = begin_folder(config, JSON_FILE)
    with connected_model(asked) as model:
        metrics = evaluate_reward(asked, records, model, tokenizer, folder)
    print(" ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


if __name__ == "__main__":
    sys.exit(evaluate())
