"""`SpanGRPOTrainer`: TRL's own steps on a tiny model, in one process and in two."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import SENTENCES, random_model
from test_credit import loop_advantages
from test_documents import ROOT

from t2g.credit import assign_credit
from t2g.feedback import decode

GENERATIONS = 4
TOKENS = 12
STEPS = 3


def judge_text(text: str) -> Any:
    """The first half of a text is good where its length is odd, the last third poor; a third of texts is not judged."""
    if len(text) % 3 == 0:
        return None
    return "", [(0, len(text) // 2)] if len(text) % 2 else [], [(len(text) * 2 // 3, len(text))]


def judge(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
    assert len(prompts) == len(completions) == len(columns["number"])
    return [judge_text(text) for text in completions]


def make_trainer(folder: Path, model: Path, **changes: Any) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Return the trainer and the list of the batches that it makes: ids, masks and advantages by row."""
    from datasets import Dataset
    from trl import GRPOConfig

    from t2g.credit.grpo import SpanGRPOTrainer

    class Recorder(SpanGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batches.append(super()._generate_and_score_completions(inputs))
            return batches[-1]

    batches: list[dict[str, torch.Tensor]] = []
    settings = {
        "num_generations": GENERATIONS, "per_device_train_batch_size": 2 * GENERATIONS, "max_steps": STEPS,
        "max_completion_length": TOKENS, "learning_rate": 1e-3, "use_cpu": True, "bf16": False, "report_to": "none",
        "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "seed": 1,
    }  # fmt: skip
    options = {"judge": judge, "train_dataset": Dataset.from_list(
        [{"prompt": text, "number": number} for number, text in enumerate(SENTENCES[:4])])}  # fmt: skip
    arguments = {name: changes.pop(name) for name in ("args", "judge", "reward_funcs") if name in changes}
    args = arguments.pop("args", None) or GRPOConfig(str(folder / "out"), **settings | changes)
    return Recorder(str(model), args=args, **options | arguments), batches


def rows_of(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    return [
        ids[mask.bool()].tolist() for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    ]


def check_advantages(tokenizer: Any, rows: list[list[int]], advantages: list[list[float]]) -> None:
    """Compare with what the loop of t2g computes of the same ids; rows are in groups of GENERATIONS."""
    judgements = [judge_text(decode(tokenizer, row)) for row in rows]
    groups = [index // GENERATIONS for index in range(len(rows))]
    expected_by_index = loop_advantages(tokenizer, rows, judgements, groups)
    for index, (row, actual) in enumerate(zip(rows, advantages, strict=True)):
        expected = expected_by_index.get(index, np.zeros(len(row)))
        np.testing.assert_allclose(actual[: len(row)], expected, atol=1e-6)
        assert not any(actual[len(row) :])


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield random_model(tmp_path / "model")
    torch.set_num_threads(threads)


def token_logprobs(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logprobs = model.eval()(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[:, :-1]
    return logprobs.gather(-1, ids[:, 1:, None])[:, -batch["completion_ids"].shape[1] :, 0]


def test_three_steps_train_on_the_loops_own_advantages(tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer, batches = make_trainer(tmp_path, model)
    trainer.train()
    assert len(batches) == STEPS == trainer.state.global_step
    for batch in batches:
        check_advantages(trainer.processing_class, rows_of(batch), batch["advantages"].tolist())
    assert not all(batch["advantages"].any(1).all() for batch in batches)  # some were not judged
    # what the spans praise is likelier than before, what they blame less likely, in the first batch
    before = token_logprobs(AutoModelForCausalLM.from_pretrained(model), batches[0])
    change = token_logprobs(trainer.model, batches[0]) - before
    advantages = batches[0]["advantages"]
    assert change[advantages > 0.1].mean() > 0 > change[advantages < -0.1].mean()
    logged = trainer.state.log_history[0]
    tokenizer = trainer.processing_class
    rows = rows_of(batches[0])
    texts = [decode(tokenizer, row) for row in rows]
    judgements = [judge_text(text) for text in texts]
    total = assign_credit(tokenizer, texts, rows, judgements, range(len(rows))).token_rewards.sum().item()
    assert logged["span_reward"] == pytest.approx(total / sum(judged is not None for judged in judgements))
    assert logged["reward"] == 0 and logged["grad_norm"] > 0


def test_reward_functions_are_added_and_a_silent_judge_changes_nothing(tmp_path: Path, model: Path) -> None:
    def silent(completions: list[str], **_: Any) -> list[Any]:
        return [("", [], [])] * len(completions)

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    trainer, _ = make_trainer(tmp_path, model, judge=silent, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] == 0
    trainer, batches = make_trainer(tmp_path, model, judge=silent, reward_funcs=[length], max_steps=1)
    trainer.train()
    (batch,) = batches
    numbers = torch.tensor([float(len(decode(trainer.processing_class, row))) for row in rows_of(batch)])
    grouped = numbers.view(-1, GENERATIONS)
    expected = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch["advantages"], expected.view(-1, 1).expand(-1, batch["advantages"].shape[1]))


def test_a_completion_without_a_number_is_excluded_and_a_second_trainer_takes_the_same_args(
    tmp_path: Path, model: Path
) -> None:
    def silent(completions: list[str], **_: Any) -> list[Any]:
        return [("", [], [])] * len(completions)

    def place(completions: list[str], **_: Any) -> list[float | None]:
        return [None if index % GENERATIONS == 0 else float(index % GENERATIONS) for index in range(len(completions))]

    args = make_trainer(tmp_path, model, judge=silent, reward_funcs=place, max_steps=1)[0].args
    assert args.reward_weights == [0.0, 1.0]
    args.reward_weights = None
    trainer, batches = make_trainer(tmp_path, model, args=args, judge=silent, reward_funcs=place)
    assert args.reward_weights is None
    trainer.train()
    # TRL: 1, 2 and 3 less their mean 2, over their deviation 1
    expected = torch.tensor([0, -1, 0, 1.0]).repeat(2) / (1 + 1e-4)
    torch.testing.assert_close(batches[0]["advantages"][:, 0], expected)


WORKER = """
import json, sys
from pathlib import Path
from test_trl import make_trainer, rows_of

folder = Path(sys.argv[1])
trainer, batches = make_trainer(folder, folder / "model", per_device_train_batch_size=2, max_steps=2)
trainer.train()
found = [[rows_of(batch), batch["advantages"].tolist()] for batch in batches]
(folder / f"rank-{trainer.accelerator.process_index}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_a_group_on_two_processes_has_the_advantages_of_one(tmp_path: Path, model: Path) -> None:
    """Each process holds two of a group's four completions."""
    (tmp_path / "worker.py").write_text(WORKER)
    path = ":".join(map(str, (tmp_path, ROOT, ROOT / "tests", Path(__file__).parent)))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "worker.py", tmp_path]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    from transformers import AutoTokenizer

    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for (first_rows, first), (second_rows, second) in zip(*ranks, strict=True):
        assert len(first_rows) == len(second_rows) == 2
        check_advantages(AutoTokenizer.from_pretrained(model), first_rows + second_rows, first + second)
