"""DPO in its own Ray process: it reports its steps, leaves a model, and ends on a stop, a missed deadline, no place."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sft_runs import make_base, two_cpus

from actors.learner.dpo import train_dpo
from t2g.config import ClusterConfig, LearnerConfig, ModelConfig, OptimConfig
from t2g.errors import RunStopped, UserError
from t2g.study.baselines import PreferencePair

CLUSTER = ClusterConfig(placement_timeout_s=5)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with two_cpus():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def train(base: Path, out_folder: Path, *, stop: bool = False, **changes: Any) -> tuple[Any, list[int]]:
    ids = [np.arange(5, 5 + n, dtype=np.int32) for n in (4, 3, 2)]
    pairs = [PreferencePair(prompt_ids=ids[0], chosen_ids=ids[1], rejected_ids=ids[2])] * 4
    fields = {"policy": OptimConfig(lr=1e-3), "num_epochs": 3, "memory_gib": 0.5, "workers": 2, "step_timeout_s": 200}
    steps: list[int] = []
    metrics = train_dpo(
        ModelConfig(policy=str(base)), LearnerConfig(**{**fields, **changes}), pairs,
        cluster=CLUSTER, stop=lambda: stop, on_progress=steps.append, batch_size=2, seed=1, out_folder=out_folder,
    )  # fmt: skip
    return metrics, steps


def test_it_trains_and_leaves_a_model_folder(base: Path, tmp_path: Path) -> None:
    metrics, steps = train(base, tmp_path / "policy")
    assert metrics["steps"] == 6  # 4 pairs, 2 a step, 3 passes
    assert metrics["margin"] > 0
    assert steps == sorted(set(steps))
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= {f.name for f in (tmp_path / "policy").iterdir()}


def test_a_stop_ends_it(base: Path, tmp_path: Path) -> None:
    assert train(base, tmp_path / "policy", stop=True) == (None, [])


def test_a_late_step_is_told(base: Path, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"DPO is late: no optimizer step for 0\.1 s after step 0"):
        train(base, tmp_path / "policy", step_timeout_s=0.1)


def test_a_model_that_cannot_be_loaded_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.policy"):
        train(tmp_path / "nothing", tmp_path / "policy")


def test_without_a_place_it_says_what_it_needs(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 1 learner workers"):
        train(base, tmp_path / "policy", cpus=16)
