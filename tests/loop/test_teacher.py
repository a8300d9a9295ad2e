"""Self-distillation from feedback: whose log-probabilities, blended how, on which tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LENGTH, letter_tokenizer
from pydantic import ValidationError
from test_steps import scored_pair, stats
from trainer_bench import Bench, job

from actors.learner.parts import LearnerSpec
from t2g.algo.losses import policy_loss
from t2g.config import LearnerConfig, ModelConfig, ObjectiveConfig
from t2g.errors import RunStopped
from t2g.loop.steps import make_train_samples, teacher_contexts
from t2g.types import Prompt, Rollout, ScoredRollout, SpanFeedback


def samples(teacher: list[list[float] | None], **rule: Any) -> list[tuple[list[float], list[float]]]:
    """Advantages and weights of two responses of one prompt with deltas 1, 0, 1 and 0, 0; log p is -1."""
    objective = ObjectiveConfig(advantages="group", whiten="none", teacher=rule, rewards={"placement": "scalar"})
    scored = [scored_pair(deltas)[1] for deltas in ([1.0, 0.0, 1.0], [0.0, 0.0])]
    learner_stats = [stats(3), stats(2)]
    rows = [None if row is None else np.array(row, np.float32) for row in teacher]
    made = make_train_samples(scored, learner_stats, objective, kl_coef=0.0, seed=1, teacher=rows)
    assert all(s.advantages.dtype == s.weights.dtype == np.float32 for s in made)
    return [(s.advantages.tolist(), s.weights.tolist()) for s in made]


def test_the_teacher_alone_gives_its_log_probability_less_the_policys() -> None:
    first, second = samples([[-0.5, -3.0, -1.0], [-1.5, -1.0]])
    assert first == ([0.5, -2.0, 0.0], [1, 1, 1])
    assert second == ([-0.5, 0.0], [1, 1])


def test_a_response_without_spans_adds_nothing_to_the_loss() -> None:
    _, second = samples([[-0.5, -3.0, -1.0], None])
    assert second[1] == [0, 0]


def test_blended_with_the_rewards_by_its_weight() -> None:
    first, second = samples([[-0.5, -3.0, -1.0], None], weight=0.25)
    # rewards against the other sample: 2 and -2 on every token
    assert first[0] == [0.75 * 2 + 0.25 * 0.5, 0.75 * 2 - 0.25 * 2, 0.75 * 2]
    assert second == ([0.75 * -2, 0.75 * -2], [1, 1])


def test_where_the_spans_are_and_nowhere_else() -> None:
    first, second = samples([[-0.5, -3.0, -1.5], [-9.0, -9.0]], where="spans")
    assert first == ([0.5, 0.0, -0.5], [1, 1, 1])  # the deltas are on the first and the last token
    assert second == ([0.0, 0.0], [1, 1])


def test_the_loss_is_that_of_trls_trainer_on_the_same_ids() -> None:
    """Value and gradient of `sampled_token` with the mean by sequence; one response has no teacher, and is masked."""
    from trl.experimental.sdpo import loss_utils as trl

    torch.manual_seed(0)
    lengths, width, vocabulary = [4, 2, 3], 4, 7
    student = torch.randn(3, width, vocabulary, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, width, vocabulary, dtype=torch.float64)
    ids = torch.randint(vocabulary, (3, width))
    has_teacher = [True, True, False]
    mask = torch.tensor([[t < n and has for t in range(width)] for n, has in zip(lengths, has_teacher, strict=True)])
    per_token = trl.compute_sampled_token_self_distillation_loss(student, teacher, ids, distillation_alpha=1.0)
    theirs = ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    (gradient,) = torch.autograd.grad(theirs, student)

    def chosen(logits: torch.Tensor, row: int) -> torch.Tensor:
        return logits[row].log_softmax(-1)[range(lengths[row]), ids[row, : lengths[row]]]

    def plain(x: torch.Tensor) -> np.ndarray:
        return x.detach().numpy().astype(np.float32)

    objective = ObjectiveConfig(advantages="group", whiten="none", loss_aggregation="sequence", teacher={})
    scored = [scored_pair([0.0] * n)[1] for n in lengths]
    learner_stats = [replace(stats(n), old_logprobs=plain(chosen(student, i))) for i, n in enumerate(lengths)]
    teacher_logprobs = [plain(chosen(teacher, i)) if has else None for i, has in enumerate(has_teacher)]
    made = make_train_samples(scored, learner_stats, objective, kl_coef=0.0, seed=1, teacher=teacher_logprobs)
    now = torch.cat([chosen(student, i) for i in range(3)])
    ours, _ = policy_loss(
        logprobs=now,
        old_logprobs=now.detach(),
        importance_weights=torch.ones_like(now),
        advantages=torch.from_numpy(np.concatenate([s.advantages for s in made])).double(),
        weights=torch.from_numpy(np.concatenate([s.weights for s in made])).double() / 3,
        clip_eps=0.2,
    )
    torch.testing.assert_close(torch.autograd.grad(ours, student)[0], gradient, rtol=1e-5, atol=1e-7)


def test_the_teacher_reads_the_best_paid_response_of_the_group_where_that_is_another() -> None:
    def one(prompt_id: str, text: str, paid: float, critique: str) -> ScoredRollout:
        made = scored_pair([paid, 0.0])[1]
        rollout = replace(made.rollout, prompt_id=prompt_id, response_text=text)
        return replace(made, rollout=rollout, feedback=replace(made.feedback, critique=critique))

    scored = [one("p", "poor", -1.0, "wrong "), one("p", "best", 2.0, "right"), one("p", "next", 1.0, "")]
    scored += [one("q", "alone", -3.0, "all wrong"), one("r", "same", 1.0, "fine"), one("r", "equal", 1.0, " ")]
    assert teacher_contexts(scored, sibling=False) == [["wrong"], ["right"], [], ["all wrong"], ["fine"], []]
    assert teacher_contexts(scored, sibling=True) == [
        ["wrong\nBetter: best", "wrong"], ["right"], ["Better: best"], ["all wrong"], ["fine"], [],
    ]  # fmt: skip
    scored[1] = replace(scored[1], truncation_penalty=-1.5)  # worth .5 now, and `next` is worth 1
    assert teacher_contexts(scored[:3], sibling=True) == [
        ["wrong\nBetter: next", "wrong"], ["right\nBetter: next", "right"], [],
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------------- in the loop
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def taught_bench(tokenizer: Any, folder: Path, **rule: Any) -> tuple[Bench, list[Rollout]]:
    """Whatever the critique says, the teacher finds every token e^.5 times as likely; what it was shown."""
    bench, shown = Bench(folder, tokenizer, job(advantages="group", whiten="none", teacher=rule)), []
    forward = bench.learner._forward

    def with_critique(rollouts: Any) -> Any:
        learner_stats = forward(rollouts)
        if len(rollouts[0].prompt_ids) == 1:  # the fakes' prompts
            return learner_stats
        shown.extend(rollouts)
        return [replace(s, old_logprobs=s.old_logprobs + np.float32(0.5)) for s in learner_stats]

    def revise(prompt: Prompt, response_text: str, critique: str, limit: int | None = None) -> Any:
        return [{"role": "user", "content": f"{response_text} | {critique}"}]

    bench.learner._forward = with_critique  # type: ignore[method-assign]
    bench.task.revise_messages = revise  # type: ignore[attr-defined]
    return bench, shown


def test_the_learner_scores_the_same_tokens_behind_the_critique(tokenizer: Any, tmp_path: Path) -> None:
    bench, shown = taught_bench(tokenizer, tmp_path)
    bench.run()
    assert all(tokenizer.decode(r.prompt_ids).count("a yes, b no") == 1 for r in shown)
    first = bench.learner.seen[0]
    assert [r.response_ids.tolist() for r in shown[: len(first)]] == [r.response_ids.tolist() for r in first]
    trained = [sample for minibatch in bench.learner.batches[0].minibatches for sample in minibatch]
    for sample in trained:
        np.testing.assert_allclose(sample.advantages, np.full(LENGTH, 0.5), rtol=1e-5)
    assert {(m["teacher/share"], round(m["teacher/gap_mean"], 4)) for m in bench.metrics()[1:]} == {(1.0, 0.5)}


def test_the_learner_says_the_old_logprobs_before_the_update_where_a_teacher_needs_them() -> None:
    """An update of one pass can say them itself; the teacher's advantage is made of them before."""
    once = LearnerConfig(num_epochs=1, minibatches_per_epoch=1)

    def spec(**objective: Any) -> LearnerSpec:
        return LearnerSpec(
            model=ModelConfig(policy="m"), learner=once, objective=ObjectiveConfig(**objective), num_updates=1, seed=1
        )

    assert spec().defers_old_logprobs and not spec(teacher={}).defers_old_logprobs


def test_where_the_better_response_does_not_fit_the_critique_alone_is_shown(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = [["a yes, b no" + " and more" * 1000, "a yes, b no"]]
    monkeypatch.setattr("t2g.loop.steps.teacher_contexts", lambda scored, sibling: contexts * len(scored))
    bench, shown = taught_bench(tokenizer, tmp_path, sibling=True)
    bench.run()
    assert shown and all("and more" not in tokenizer.decode(r.prompt_ids) for r in shown)
    assert {m["teacher/share"] for m in bench.metrics()[1:]} == {1.0}


def test_a_step_without_any_critique_stops_the_run(tokenizer: Any, tmp_path: Path) -> None:
    bench, _ = taught_bench(tokenizer, tmp_path)
    judge = bench.feedback.judge

    async def silent(prompt: Prompt, response_text: str) -> SpanFeedback:
        return replace(await judge(prompt, response_text), critique=" ")

    bench.feedback.judge = silent  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match=r"no response has a critique for objective\.teacher"):
        bench.run()


def test_a_teacher_needs_critiques() -> None:
    with pytest.raises(ValidationError, match=r"feedback\.style\.critique=false has none"):
        type(job()).model_validate(
            {
                "model": {"policy": "m"},
                "data": {"path": "d"},
                "feedback": {"source": "program", "style": {"critique": False}},
                "objective": {"teacher": {}},
            }
        )
