"""Self-distillation from feedback: which critique the teacher reads, what a sample carries, and the loss."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LENGTH, letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from test_steps import scored_pair, stats
from trainer_bench import Bench, job

from actors.learner.spec import LearnerSpec
from t2g.algo.kl import top_k_kl
from t2g.config import LearnerConfig, ModelConfig, ObjectiveConfig, PolicyJob, with_overrides
from t2g.config.learning import TeacherConfig
from t2g.data.prompts import encode_teacher_prompt, make_prompts
from t2g.errors import RunStopped
from t2g.loop.steps import make_train_samples
from t2g.loop.teacher import teacher_contrast, teacher_critiques, teacher_metrics
from t2g.tasks.base import get_task
from t2g.types import DistillationSample, Prompt, SpanFeedback, TeacherQuery, TeacherStats

TOP = 4


def teacher_stats(logprobs: list[float]) -> TeacherStats:
    top = np.tile(np.array(logprobs, np.float32)[:, None], (1, TOP)) - 1
    return TeacherStats(logprobs=np.array(logprobs, np.float32), top_logprobs=top)


def samples(teacher: list[list[float] | None], **rule: Any) -> list[DistillationSample]:
    """Two responses of one prompt with rewards 1, 0, 1 and 0, 0."""
    objective = ObjectiveConfig(advantages="group", whiten="none", teacher=rule, rewards={"placement": "scalar"})
    scored = [scored_pair(rewards)[1] for rewards in ([1.0, 0.0, 1.0], [0.0, 0.0])]
    learner_stats = [replace(stats(n), top_ids=np.arange(n * TOP, dtype=np.int32).reshape(n, TOP)) for n in (3, 2)]
    teacher_rows = [None if row is None else teacher_stats(row) for row in teacher]
    train_samples = make_train_samples(scored, learner_stats, objective, kl_coef=0.0, seed=1, teacher=teacher_rows)
    assert all(isinstance(s, DistillationSample) for s in train_samples)
    return train_samples  # type: ignore[return-value]


def test_a_sample_carries_the_teachers_log_probabilities_and_the_advantages_of_the_rewards() -> None:
    first, second = samples([[-0.5, -3.0, -1.0], [-1.5, -1.0]], weight=0.5)
    assert first.advantages.tolist() == [2, 2, 2]
    assert second.advantages.tolist() == [-2, -2]
    assert first.teacher_logprobs.tolist() == [[-1.5] * TOP, [-4.0] * TOP, [-2.0] * TOP]
    assert first.top_ids.tolist() == np.arange(12).reshape(3, TOP).tolist()
    assert [s.teacher_mask.tolist() for s in (first, second)] == [[1, 1, 1], [1, 1]]
    assert [s.weights.tolist() for s in (first, second)] == [[1, 1, 1], [1, 1]]


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.0), (0.25, 1.0)])
def test_a_response_without_a_critique_has_the_loss_of_its_rewards_alone(weight: float, share: float) -> None:
    first, second = samples([[-0.5, -3.0, -1.0], None], weight=weight)
    assert first.weights.tolist() == [1, 1, 1]
    assert second.weights.tolist() == [share, share]
    assert second.teacher_mask.tolist() == [0, 0]
    assert second.teacher_logprobs.shape == second.top_ids.shape == (2, TOP)


@pytest.mark.parametrize("has_critique", [True, False])
def test_a_teacher_that_scales_multiplies_the_whitened_advantages_of_its_response_alone(has_critique: bool) -> None:
    """Advantages 2 and -2 at scale 1 / 2; gaps .5, -2, 0 clipped at log 2; a critique for one response."""
    objective = ObjectiveConfig(
        advantages="group", whiten="scale_only", rewards={"placement": "scalar"}, teacher={"use": "scale"}
    )
    scored = [scored_pair(rewards)[1] for rewards in ([1.0, 0.0, 1.0], [0.0, 0.0])]
    learner_stats = [stats(3), stats(2)]  # log-probability -1
    teacher = TeacherStats(logprobs=np.array([-0.5, -3.0, -1.0], np.float32)) if has_critique else None
    first, second = make_train_samples(scored, learner_stats, objective, kl_coef=0.0, seed=1, teacher=[teacher, None])
    unscaled = np.array([math.exp(0.5), 2.0, 1.0]) if has_critique else np.ones(3)
    np.testing.assert_allclose(first.advantages, unscaled / unscaled.mean(), rtol=1e-6)
    np.testing.assert_allclose(second.advantages, [-1, -1], rtol=1e-6)
    assert first.weights.tolist() == [1, 1, 1] and second.weights.tolist() == [1, 1]
    assert not isinstance(first, DistillationSample), "the loss has no KL to the teacher"


def test_a_teacher_that_scales_acts_after_local_credit_and_leaves_out_tokens_without_a_loss() -> None:
    """Local credit turns the sign of the second token; the last is thinking, which has no loss.

    A gap of .5 at the first two: both count more, whatever their sign.
    """
    rule = {"use": "scale", "bound": 4.0}
    base = ObjectiveConfig(advantages="group", whiten="none", local_coef=8.0, local_cap=1.0, train_thinking=False)
    answer_mask = np.array([True, True, True, True, False])
    first = replace(scored_pair([1.0, -1.0, 2.0, -1.0, 3.0])[1], answer_mask=answer_mask)
    scored = [first, scored_pair([0.0] * 5)[1]]
    learner_stats = [stats(5), stats(5)]
    (plain, _) = make_train_samples(scored, learner_stats, base, kl_coef=0.0, seed=1)
    advantages = plain.advantages[:4]
    assert (np.sign(advantages) == [1, -1, 1, -1]).all()
    teacher = TeacherStats(logprobs=np.array([-0.5, -0.5, -1.0, -1.0, -9.0], np.float32))
    objective = with_overrides(base, {"teacher": rule})
    (scaled, _) = make_train_samples(scored, learner_stats, objective, kl_coef=0.0, seed=1, teacher=[teacher, None])
    unscaled = np.array([math.exp(0.5), math.exp(0.5), 1.0, 1.0])
    expected = advantages * unscaled / unscaled.mean()
    np.testing.assert_allclose(scaled.advantages[:4], expected, rtol=1e-5)
    assert scaled.advantages[4] == plain.advantages[4] and scaled.weights.tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("top_k", [1, 3, 7])
def test_the_loss_is_that_of_trls_trainer_on_the_same_ids(top_k: int) -> None:
    """Value and gradient of reverse KL over the student's likeliest tokens with a tail; 7 are the whole vocabulary."""
    from trl.experimental.sdpo import loss_utils as trl

    torch.manual_seed(0)
    student = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 4, 7, dtype=torch.float64)
    theirs = trl.compute_topk_self_distillation_loss(
        student, teacher, distillation_topk=top_k, distillation_alpha=1.0, distillation_add_tail=True
    )
    logprobs = student.log_softmax(-1)
    ids = student.topk(top_k).indices
    ours = top_k_kl(logprobs.gather(-1, ids).flatten(0, 1), teacher.log_softmax(-1).gather(-1, ids).flatten(0, 1)).view(
        3, 4
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(loss.sum(), student, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)
    if top_k == 7:
        full = trl.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=1.0)
        torch.testing.assert_close(ours, full, rtol=1e-5, atol=1e-6)


def test_the_control_reads_critiques_of_another_prompt_only() -> None:
    ids = ["p", "q", "p", "p", "r"]
    critiques = ["p0 ", "q0", "p1", "p2", " "]
    assert teacher_critiques(ids, critiques, shuffled=False) == ["p0", "q0", "p1", "p2", ""]
    assert teacher_critiques(ids, critiques, shuffled=True) == ["q0", "p0", "q0", "q0", "p0"]
    assert teacher_critiques(["p", "p", "q"], ["p0", "p1", ""], shuffled=True) == ["", "", "p0"]
    assert teacher_critiques(["p"], ["p0"], shuffled=True) == [""]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["", " ", "c", "d"]))))
def test_the_control_reads_an_empty_critique_only_where_no_other_prompt_has_one(step: list[tuple[int, str]]) -> None:
    ids = [f"p{number}" for number, _ in step]
    critiques = [f"{text}{prompt_id}" if text.strip() else text for prompt_id, (_, text) in zip(ids, step, strict=True)]
    for prompt_id, critique in zip(ids, teacher_critiques(ids, critiques, shuffled=True), strict=True):
        others = {text for other, text in zip(ids, critiques, strict=True) if other != prompt_id and text.strip()}
        assert critique in (others or {""})


def test_the_gaps_are_means_over_good_poor_and_first_poor_tokens() -> None:
    scored = [scored_pair(rewards)[1] for rewards in ([1.0, -1.0, -1.0, 0.0, -2.0], [0.0, 0.0])]
    policy = [stats(5), stats(2)]  # log-probability -1
    teacher = [teacher_stats([-0.5, -1.25, -3.0, -9.0, -1.75]), None]
    metrics = teacher_metrics(scored, teacher, policy, ObjectiveConfig(teacher=TeacherConfig()))
    assert metrics == pytest.approx(
        {
            "teacher/share": 0.5,
            "teacher/gap_good": 0.5,
            "teacher/gap_poor": (-0.25 - 2.0 - 0.75) / 3,
            "teacher/gap_poor_first": (-0.25 - 0.75) / 2,
            "teacher/contrast": 0.5,
        }
    )
    scale = ObjectiveConfig(teacher=TeacherConfig(use="scale", bound=math.exp(1.5)), train_thinking=False)
    scaling = teacher_metrics(scored, teacher, policy, scale)
    assert scaling == metrics | {"teacher/clipped_share": 2 / 5}, "gaps .5 -.25 -2 -8 -.75, clipped at 1.5"
    answer_mask = np.array([True, True, True, False, True])
    thinks = [replace(scored[0], answer_mask=answer_mask), scored[1]]
    scaling = teacher_metrics(thinks, teacher, policy, scale)
    assert scaling["teacher/clipped_share"] == 1 / 4, "without the gap of -8, which is thinking"
    for objective in (scale, ObjectiveConfig(teacher=TeacherConfig())):
        assert teacher_metrics(scored, [None, None], policy, objective) == {"teacher/share": 0.0}


@pytest.mark.parametrize(
    ("good", "poor_first", "contrast"), [(0.5, -0.25, 0.25), (-1.25, -0.25, -1.0), (0.5, 0.25, -0.25), (None, -2, 2)]
)
def test_the_contrast_is_negative_if_poor_tokens_rise_or_good_ones_fall_further(
    good: float | None, poor_first: float, contrast: float
) -> None:
    means = {"poor_first": poor_first} | ({} if good is None else {"good": good})
    assert teacher_contrast(means) == {"contrast": contrast}


# --------------------------------------------------------------------------------------------------------- in the loop
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def bench_with_teacher(tokenizer: Any, folder: Path, **rule: Any) -> tuple[Bench, list[TeacherQuery]]:
    """Return a bench whose teacher makes every token e^.5 times as likely, and the list of the teacher's queries."""
    bench = Bench(folder, tokenizer, job(advantages="group", whiten="none", teacher=rule))
    queries = []
    forward = bench.learner._forward

    def with_top_ids(rollouts: Any) -> Any:
        return [replace(s, top_ids=np.zeros((LENGTH, TOP), np.int32)) for s in forward(rollouts)]

    def score_teacher(requests: Any) -> list[TeacherStats]:
        queries.extend(requests)
        return [teacher_stats([-0.5] * LENGTH) for _ in requests]

    def show(prompt: Prompt, critique: str) -> Any:
        return [{"role": "user", "content": f"{prompt.prompt_id} | {critique}"}]

    bench.learner._forward = with_top_ids  # type: ignore[method-assign]
    bench.learner.score_teacher = score_teacher  # type: ignore[attr-defined]
    bench.task.teacher_messages = show  # type: ignore[attr-defined]
    return bench, queries


def test_the_teacher_scores_the_sampled_tokens_after_the_critique(tokenizer: Any, tmp_path: Path) -> None:
    bench, queries = bench_with_teacher(tokenizer, tmp_path)
    bench.run()
    assert all(tokenizer.decode(query.prompt_ids).count("a yes, b no") == 1 for query in queries)
    first = bench.learner.seen[0]
    assert [q.response_ids.tolist() for q in queries[: len(first)]] == [r.response_ids.tolist() for r in first]
    trained = [sample for minibatch in bench.learner.batches[0].minibatches for sample in minibatch]
    for sample in trained:
        np.testing.assert_array_equal(sample.teacher_logprobs, np.full((LENGTH, TOP), -1.5))
    assert {m["teacher/share"] for m in bench.metrics()[1:]} == {1.0}


def test_a_critique_that_does_not_fit_whole_is_not_read_and_the_others_are(tokenizer: Any, tmp_path: Path) -> None:
    bench, queries = bench_with_teacher(tokenizer, tmp_path, weight=0.5)
    window = bench.trainer.config.revision_window

    def show(prompt: Prompt, critique: str) -> Any:
        return [{"role": "user", "content": "a" * (window if int(prompt.prompt_id[1:]) % 2 else 9)}]

    bench.task.teacher_messages = show  # type: ignore[attr-defined]
    bench.run()
    step = bench.learner.seen[0]
    fitting = [int(r.prompt_id[1:]) % 2 == 0 for r in step]
    assert 0 < sum(fitting) < len(step)
    assert bench.metrics()[1]["teacher/share"] == pytest.approx(sum(fitting) / len(step))
    assert [q.response_ids.tolist() for q in queries[: sum(fitting)]] == [
        r.response_ids.tolist() for r, fits in zip(step, fitting, strict=True) if fits
    ]
    trained = {s.response_ids.tobytes(): s for m in bench.learner.batches[0].minibatches for s in m}
    assert sum(s.teacher_mask.all() for s in trained.values()) > 0
    assert all(s.weights.all() and s.teacher_mask.min() == s.teacher_mask.max() for s in trained.values())


def test_old_logprobs_are_computed_before_the_update_for_a_teacher() -> None:
    """The teacher is queried for the likeliest tokens of the policy before the update."""
    once = LearnerConfig(num_epochs=1, minibatches_per_epoch=1)

    def spec(**objective: Any) -> LearnerSpec:
        return LearnerSpec(
            model=ModelConfig(policy="m"), learner=once, objective=ObjectiveConfig(**objective), num_updates=1, seed=1
        )

    assert spec().defers_old_logprobs
    assert not spec(teacher={}).defers_old_logprobs
    scaling = spec(teacher={"use": "scale"})
    assert not scaling.defers_old_logprobs
    assert "top_ids" in spec(teacher={}).stats_fields and "top_ids" not in scaling.stats_fields


@pytest.mark.parametrize("weight", [1, 0.5])
def test_a_step_without_any_critique_has_the_loss_of_its_rewards_or_stops(
    tokenizer: Any, tmp_path: Path, weight: float
) -> None:
    bench, queries = bench_with_teacher(tokenizer, tmp_path, weight=weight)
    judge = bench.feedback.judge

    async def silent(prompt: Prompt, response_text: str) -> SpanFeedback:
        return replace(await judge(prompt, response_text), critique=" ", status="empty", spans=())

    bench.feedback.judge = silent  # type: ignore[method-assign]
    if weight == 1:
        with pytest.raises(RunStopped, match=r"no response of the step has a critique for objective\.teacher"):
            bench.run()
    else:
        bench.run()
        assert queries == []
        assert {m["teacher/share"] for m in bench.metrics()[1:]} == {0.0}
        trained = [sample for batch in bench.learner.batches for m in batch.minibatches for sample in m]
        assert all((s.weights > 0).all() and not s.teacher_mask.any() for s in trained)


@pytest.mark.parametrize("has_critiques", [True, False])
def test_a_run_with_a_teacher_that_scales_needs_no_likeliest_tokens_and_no_critiques(
    tokenizer: Any, tmp_path: Path, has_critiques: bool
) -> None:
    """The bench's teacher makes every token e^.5 times as likely: it agrees with praise and not with criticism."""
    bench, queries = bench_with_teacher(tokenizer, tmp_path, use="scale")
    judge = bench.feedback.judge

    async def silent(prompt: Prompt, response_text: str) -> SpanFeedback:
        return replace(await judge(prompt, response_text), critique="")

    if not has_critiques:
        bench.feedback.judge = silent  # type: ignore[method-assign]
    bench.run()
    metrics = bench.metrics()[1:]
    assert {row["teacher/share"] for row in metrics} == {float(has_critiques)}
    assert all("teacher/kl" not in row and ("teacher/clipped_share" in row) == has_critiques for row in metrics)
    assert bool(queries) == has_critiques
    trained = [sample for batch in bench.learner.batches for m in batch.minibatches for sample in m]
    assert not any(isinstance(sample, DistillationSample) for sample in trained)


# ------------------------------------------------------------------------------------------------ prompt and settings
@pytest.mark.parametrize("task", ["prompts", "qa", "code", "summarization"])
def test_the_teacher_reads_the_policys_own_chat_with_the_critique_after_it(task: str, tokenizer: Any) -> None:
    chat = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(("system", "user", "assistant", "user"))]
    record = {
        "prompts": {"messages": chat}, "qa": {"messages": chat}, "code": {"question": "Add.", "test": "assert True"},
        "summarization": {"post": "I ask."},
    }[task]  # fmt: skip
    (prompt,) = make_prompts([record], get_task(task), tokenizer, 10_000)
    *history, last = get_task(task).policy_messages(record)
    *messages, end = get_task(task).teacher_messages(prompt, "Line 2 is wrong.")
    assert messages == history and end["role"] == "user"
    assert end["content"].startswith(last["content"])
    assert "Line 2 is wrong." in end["content"]


def test_a_teachers_prompt_is_whole_or_there_is_none(tokenizer: Any) -> None:
    task = get_task("summarization")
    (prompt,) = make_prompts([{"post": "word " * 50}], task, tokenizer, 10_000)
    ids = encode_teacher_prompt(task, prompt, "It is wrong.", tokenizer, 10_000)
    assert ids is not None and "word " * 50 in tokenizer.decode(ids)
    assert encode_teacher_prompt(task, prompt, "It is wrong.", tokenizer, len(ids)).tolist() == ids.tolist()
    assert encode_teacher_prompt(task, prompt, "It is wrong.", tokenizer, len(ids) - 1) is None


def policy_job(**sections: Any) -> PolicyJob:
    base = {"model": {"policy": "m"}, "data": {"path": "d"}, "feedback": {"source": "program"}}
    return PolicyJob.model_validate(base | sections)


def test_a_teacher_alone_needs_no_group_and_no_critic() -> None:
    alone, half = ({"teacher": {"weight": weight}} for weight in (1, 0.5))
    one = {"samples_per_prompt": 1}
    rules = [policy_job(objective=objective, rollout=one).objective for objective in (alone, half)]
    assert [(rule.advantages, rule.kl_estimator, rule.uses_critic) for rule in rules] == [
        ("group", "k3", False), ("gae", "k1", True),
    ]  # fmt: skip
    with pytest.raises(ValidationError, match=r"rollout\.samples_per_prompt is 1"):
        policy_job(objective=half | {"advantages": "group"}, rollout=one)
    with pytest.raises(ValidationError, match=r"objective\.kl_estimator=k1 is part of the rewards"):
        policy_job(objective=alone | {"kl_estimator": "k1"})


def test_a_teacher_that_scales_trains_the_rewards() -> None:
    scale = {"teacher": {"use": "scale"}}
    single = policy_job(objective=scale, rollout={"samples_per_prompt": 1}).objective
    assert single.uses_critic and single.trains_rewards and single.distillation is None
    with pytest.raises(ValidationError, match=r"rollout\.samples_per_prompt is 1"):
        policy_job(objective=scale | {"advantages": "group"}, rollout={"samples_per_prompt": 1})
    with pytest.raises(ValidationError, match=r"objective\.teacher\.weight=0\.5 is the share of the distillation"):
        policy_job(objective={"teacher": {"use": "scale", "weight": 0.5}})
    with pytest.raises(ValidationError, match=r"objective\.teacher\.bound=4 bounds the weights of use=scale"):
        policy_job(objective={"teacher": {"bound": 4}})
    with pytest.raises(ValidationError, match=r"objective\.teacher\.top_k=5 is for the KL of use=distill"):
        policy_job(objective={"teacher": {"use": "scale", "top_k": 5}})
    for bound in (1, 0.5, math.nan, math.inf):
        with pytest.raises(ValidationError, match="bound"):
            policy_job(objective={"teacher": {"use": "scale", "bound": bound}})


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"teacher": {}}, r"objective\.teacher reads them"),
        ({"teacher": {"use": "scale"}}, r"objective\.teacher reads them"),
        ({"local_coef": 0.3}, r"objective\.local_coef=0\.3 pays their spans"),
        ({"whiten": "full"}, r"objective\.whiten=full would praise"),
        ({"kl_estimator": "k1"}, r"objective\.kl_estimator=k1 is part of the rewards"),
        ({"values": "span"}, r"objective\.values=span replaces a critic for advantages=group"),
    ],
)
def test_the_control_without_critiques_refuses_what_would_add_them(rule: dict[str, Any], sentence: str) -> None:
    single = policy_job(objective={"advantages": "unlikely"}, rollout={"samples_per_prompt": 1}).objective
    assert (single.whiten, single.local_coef, single.kl_estimator) == ("scale_only", 0, "k3")
    with pytest.raises(ValidationError, match=sentence):
        ObjectiveConfig(advantages="unlikely", **rule)


def test_the_control_needs_two_prompts_in_a_step() -> None:
    control = {"teacher": {"critique": "shuffled"}}
    assert policy_job(objective=control, rollout={"prompts_per_step": 2}).objective.teacher is not None
    with pytest.raises(ValidationError, match=r"rollout\.prompts_per_step is 1 and needs to be 2"):
        policy_job(objective=control, rollout={"prompts_per_step": 1})


def test_a_teacher_needs_critiques() -> None:
    with pytest.raises(ValidationError, match=r"feedback\.style\.critique=false has none"):
        policy_job(feedback={"source": "program", "style": {"critique": False}}, objective={"teacher": {}})
