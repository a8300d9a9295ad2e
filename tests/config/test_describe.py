"""What a dry run says, with the arithmetic done by hand."""

import pytest

from t2g.config import (
    AnnotateConfig,
    AnnotateJob,
    DataConfig,
    DemoJob,
    FeedbackConfig,
    LearnerConfig,
    LLMConfig,
    ModelConfig,
    PolicyJob,
    RewardJob,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    SFTJob,
    SFTOptions,
    with_overrides,
)
from t2g.config.describe import max_microbatches

MODEL = ModelConfig(policy="base")
DATA = DataConfig(path="a.jsonl")
PROGRAM = FeedbackConfig(source="my_feedback:judge")
RUN = RunConfig(root="/data", name="one")
ROLLOUT = RolloutConfig(prompts_per_step=12, samples_per_prompt=2, max_model_len=500, workers=2, cpus=1, memory_gib=2)
LEARNER = LearnerConfig(num_epochs=4, minibatches_per_epoch=3, tokens_per_microbatch=1100, workers=2, gpus=1)


@pytest.mark.parametrize(
    ("tokens", "model_len", "minibatches", "ranks", "expected"),
    [
        (4096, 1024, 1, 1, 16),  # 64 sequences, 4 fit
        (4096, 1000, 1, 1, 16),  # 4 fit, 96 tokens stay empty
        (4096, 1024, 3, 2, 3),  # 64 / 6 -> 11 on a rank, 4 fit
        (100, 1024, 1, 1, 64),  # a sequence longer than the budget has a microbatch of its own
    ],
)
def test_most_microbatches(tokens: int, model_len: int, minibatches: int, ranks: int, expected: int) -> None:
    learner = LearnerConfig(tokens_per_microbatch=tokens, minibatches_per_epoch=minibatches, workers=ranks)
    rollout = RolloutConfig(prompts_per_step=16, samples_per_prompt=4, max_model_len=model_len)
    assert max_microbatches(rollout, learner) == expected


@pytest.mark.parametrize(
    ("minibatches", "ranks", "expected"),
    [
        (1, 1, 32),  # 16 prompts with 5 responses, of which 3 fit: two microbatches for each prompt
        (1, 2, 16),
        (4, 1, 20),  # 80 samples, mixed: as many microbatches as samples
    ],
)
def test_most_microbatches_of_shared_prompts(minibatches: int, ranks: int, expected: int) -> None:
    rollout = RolloutConfig(prompts_per_step=16, samples_per_prompt=5, max_model_len=100, max_new_tokens=50)
    budget = {"tokens_per_microbatch": 300, "share_prompts": True}
    learner = LearnerConfig(minibatches_per_epoch=minibatches, workers=ranks, **budget)
    assert max_microbatches(rollout, learner) == expected


def test_policy() -> None:
    job = PolicyJob(run=RUN, model=MODEL, data=DATA, num_steps=50, feedback=PROGRAM, rollout=ROLLOUT, learner=LEARNER)
    assert job.describe().splitlines() == [
        "step: 12 prompts x 2 samples = 24 samples, temperature 1, at most 128 new tokens each",
        "update: 4 epochs x 3 minibatches = 12 optimizer steps a step, "
        "each of at most 2 microbatches of 1100 tokens on each of 2 ranks",
        "weights: by store, into engines of float32",
        "run: 50 steps, 1,200 samples in all",
        "feedback: my_feedback:judge",
        "objective: rewards at span, advantages group",
        "evaluation: none, there is no eval_data",
        "rollout: 2 actors, each 1 CPU, 0 GPU, 1 thread, about 2 GiB",
        "learner: 2 actors, each 0.5 CPU, 1 GPU, 1 thread, about 1.5 GiB",
        "together: 3 CPU, 2 GPU, about 7 GiB",
        "run folder: /data/one",
    ]


def test_further_prompts_are_counted() -> None:
    rollout = ROLLOUT.model_copy(update={"resample_zero_groups": 3})
    job = PolicyJob(model=MODEL, data=DATA, num_steps=50, feedback=PROGRAM, rollout=rollout, learner=LEARNER)
    text = job.describe()
    assert "at most 3 prompts more" in text
    assert "1,200 samples in all, and at most 300 more\n" in text


def test_a_reward_model_has_a_role_and_evaluation_is_described() -> None:
    feedback = FeedbackConfig(reward_model="rm")
    text = PolicyJob(model=MODEL, data=DATA, eval_data=DATA, feedback=feedback, environment="a:B").describe()
    assert "environment: a:B, at most 2 turns in a window of 1024 tokens\n" in text
    assert "feedback.engine: 1 actor, each 0.5 CPU" in text
    assert "evaluation: every 5 steps, 128 prompts x 1 sample of a.jsonl" in text
    assert "together: 1.5 CPU" in text


def test_demo_counts_per_method() -> None:
    text = DemoJob(num_steps=10, rollout=ROLLOUT, learner=LEARNER).describe()
    assert "phase 3: 3 methods (span, scalar, shuffled), one by one, each" in text
    assert "run: 10 steps, 240 samples in all" in text
    assert "world: 4,000 posts to train on, 256 held out" in text


def test_supervised_jobs() -> None:
    options = SFTOptions(workers=2, cpus=1, num_epochs=1.5, batch_size=8)
    assert SFTJob(run=RUN, model=MODEL, data=DATA, sft=options).describe().splitlines() == [
        "supervised: 1.5 epochs, 8 examples an optimizer step (steps = 1.5 x examples / 8), 2 ranks",
        "sft: 2 actors, each 1 CPU, 0 GPU, 1 thread, about 1.5 GiB",
        "together: 2 CPU, 0 GPU, about 3 GiB",
        "run folder: /data/one",
    ]
    text = RewardJob(model=MODEL, data=DATA, eval_data=DataConfig(path="b.jsonl"), sft=options).describe()
    assert "evaluation: at most 200 records of b.jsonl" in text
    assert "engine: 1 actor, each 0.5 CPU" in text
    assert "together: 2 CPU, 0 GPU, about 3 GiB" in text  # the engine starts when the ranks have gone


def test_annotate() -> None:
    annotate = AnnotateConfig(source="my_feedback:judge", responses="policy")
    text = AnnotateJob(model=MODEL, data=DATA, annotate=annotate, rollout=ROLLOUT).describe()
    assert text.startswith("2 responses to each prompt of a.jsonl, temperature 1, at most 128 new tokens each\n")
    assert "feedback: my_feedback:judge; records of 10% of the prompts are held out" in text
    assert "rollout: 2 actors" in text


def test_annotation_of_given_responses() -> None:
    assert AnnotateJob(run=RUN, data=DATA).describe().splitlines() == [
        "the response of each record of a.jsonl",
        "feedback: program; records of 10% of the prompts are held out",
        "no own engines, and no Ray",
        "run folder: /data/one",
    ]
    human = AnnotateConfig(source="human", human_file="h.csv", align="llm", llm=LLMConfig(model="m"))
    planted = AnnotateJob(run=RUN, data=DATA, annotate=AnnotateConfig(planted=0.5)).describe()
    assert planted.startswith("the response of each record of a.jsonl; 0.5 more for each prompt with planted faults\n")
    text = AnnotateJob(data=DATA, annotate=human).describe()
    assert "feedback: human, aligned by llm; " in text and "annotate.engine: 1 actor, each 0.5 CPU" in text


def test_the_roles_of_a_job_are_the_sections_that_say_what_they_need() -> None:
    apart = LearnerConfig(critic_ranks=RoleConfig(workers=3))
    job = PolicyJob(model=MODEL, data=DATA, feedback=FeedbackConfig(reward_model="rm"), learner=apart)
    assert list(job.roles()) == ["rollout", "learner", "learner.critic_ranks", "feedback.engine"]
    assert job.roles()["learner.critic_ranks"].num_processes == 3
    without = with_overrides(job, {"objective.advantages": "group", "feedback.source": "program"})
    assert list(without.roles()) == ["rollout", "learner"]
    assert list(DemoJob().roles()) == ["rollout", "learner", "reward_engine"]
    assert AnnotateJob(data=DATA).roles() == {}
