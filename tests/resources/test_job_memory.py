"""Which ranks a job has, and what they load and store: PPO, supervised training, and jobs that train nothing."""

import pytest

from t2g.config import AnnotateJob, AnyJob, CompareJob, DemoJob, PolicyJob, RewardJob, ServeJob, SFTJob
from t2g.resources.job_memory import JobRanks, PolicyRanks, SupervisedRanks, find_ranks, store_gib
from t2g.resources.model_shape import ModelShape

TRAINED = {"model": {"policy": "m"}, "data": {"path": "d"}}
FEEDBACK = {"feedback": {"source": "program"}}
TOY = ModelShape(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=16,
    vocab_size=100,
)  # fmt: skip
NUMEL = 2792  # of TOY


def policy_ranks(**learner: object) -> JobRanks:
    ranks = find_ranks(PolicyJob.model_validate(TRAINED | FEEDBACK | {"learner": learner}))
    assert ranks is not None
    return ranks


@pytest.mark.parametrize(
    ("job", "kind", "section"),
    [
        (PolicyJob.model_validate(TRAINED | FEEDBACK), PolicyRanks, "learner"),
        (CompareJob.model_validate(TRAINED | FEEDBACK | {"eval_data": {"path": "e"}}), PolicyRanks, "learner"),
        (SFTJob.model_validate(TRAINED), SupervisedRanks, "sft"),
        (RewardJob.model_validate(TRAINED | {"eval_data": {"path": "e"}}), SupervisedRanks, "sft"),
    ],
)
def test_jobs_that_train(job: AnyJob, kind: type[JobRanks], section: str) -> None:
    ranks = find_ranks(job)
    assert isinstance(ranks, kind)
    assert (ranks.section, ranks.model.policy) == (section, "m")


def test_jobs_without_ranks_of_their_own() -> None:
    jobs = [AnnotateJob.model_validate({"data": {"path": "d"}}), ServeJob.model_validate({"model": {"policy": "m"}})]
    for job in [*jobs, DemoJob()]:
        assert find_ranks(job) is None
        assert store_gib(job) == 1.0


def test_what_a_rank_loads() -> None:
    supervised = find_ranks(SFTJob.model_validate(TRAINED | {"sft": {"dtype": "bfloat16"}}))
    assert supervised is not None
    assert supervised.count_load_bytes(TOY) == 2 * NUMEL
    assert policy_ranks().count_load_bytes(TOY) == 4 * 2 * NUMEL  # with the frozen reference


def test_what_is_stored_for_late_engines() -> None:
    assert policy_ranks().count_stored_bytes(TOY) == 4 * NUMEL
    assert policy_ranks(lora={"r": 3}).count_stored_bytes(TOY) == 4 * TOY.lora_numel(3)
    on_gpus = {"learner": {"gpus": 1}, "rollout": {"gpus": 1}}
    ranks = find_ranks(PolicyJob.model_validate(TRAINED | FEEDBACK | on_gpus))
    assert ranks is not None
    assert ranks.count_stored_bytes(TOY) == 0  # broadcast by NCCL
    supervised = find_ranks(SFTJob.model_validate(TRAINED))
    assert supervised is not None
    assert supervised.count_stored_bytes(TOY) == 0


def test_a_long_sequence_is_a_microbatch_of_its_own() -> None:
    short = {"tokens_per_microbatch": 64, "max_length": 64}
    long = {"tokens_per_microbatch": 64, "max_length": 256}
    sizes = []
    for sft in (short, long):
        ranks = find_ranks(SFTJob.model_validate(TRAINED | {"sft": sft}))
        assert ranks is not None
        sizes.append(ranks.estimate_gpu(TOY, "sft", 1).parts["activations"])
    assert sizes[1] == 4 * sizes[0]
