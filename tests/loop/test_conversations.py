"""Conversations in the objective: inserted tokens have no loss, and every number passes over them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversations import conversations, make_conversation
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.algo.corrections import importance_weights
from t2g.algo.losses import kl_loss, policy_loss, value_loss, weighted_sum
from t2g.config import NoiseConfig, ObjectiveConfig
from t2g.data.batching import make_train_batch
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.feedback.conversations import NEXT_MESSAGE
from t2g.feedback.outcome_rewards import list_messages
from t2g.feedback.parse import make_feedback
from t2g.feedback.sources.next_message import NextMessageFeedback
from t2g.feedback.sources.noise import NoisyFeedback
from t2g.feedback.sources.program import ProgramFeedback
from t2g.interfaces import Aligner, FeedbackSource
from t2g.loop.annotation import make_turn_samples
from t2g.loop.sampling import judge_answer
from t2g.loop.step_metrics import step_metrics
from t2g.loop.steps import compute_step_kl, compute_token_staleness, make_train_samples
from t2g.tasks.prompts_only import PromptsTask
from t2g.text.thinking import NO_ANSWER
from t2g.types import JudgedResponse, Prompt, Rollout, ScoredRollout, Span, SpanFeedback, TokenStats, TrainSample

FEEDBACK = SpanFeedback(critique="", spans=(), status="ok", source="s", version="v")
POISON = 1e4  # of inserted tokens


def score(rollout: Rollout, *, seed: int = 0) -> tuple[ScoredRollout, TokenStats]:
    rng = np.random.default_rng(seed)
    size = len(rollout.response_ids)
    mask = rollout.policy_mask
    rewards = (rng.integers(-1, 2, size) * mask).astype(np.float32)
    scored = ScoredRollout(
        rollout=rollout, feedback=FEEDBACK, token_rewards=rewards, span_values=rewards,
        sentence_ids=np.zeros(size, np.int32), outcome_reward=float(rng.integers(0, 2)), answer_mask=mask,
    )  # fmt: skip
    rows = {name: rng.normal(-1, 0.5, size).astype(np.float32) for name in ("old_logprobs", "ref_logprobs", "values")}
    stats = {name: np.where(mask, row, POISON).astype(np.float32) for name, row in rows.items()}
    return scored, TokenStats(**stats, entropy=np.where(mask, 0.5, POISON).astype(np.float32))


def oracle_returns(scored: ScoredRollout, stats: TokenStats, objective: ObjectiveConfig, kl_coef: float) -> list[float]:
    """The returns of the sampled tokens, by a plain loop from the last to the first."""
    positions = [t for turn in scored.rollout.turns for t in range(*turn.tokens)]
    last = {turn.tokens[1] - 1 for turn in scored.rollout.turns}
    following = 0.0
    returns = []
    for t in reversed(positions):
        reward = objective.span_coef * scored.token_rewards[t]
        reward += scored.outcome_reward if t == positions[-1] else 0.0
        if not objective.kl_in_loss:
            reward -= kl_coef * (stats.old_logprobs[t] - stats.ref_logprobs[t])
        discount = objective.gamma * (objective.turn_gamma if t in last else 1.0)
        following = float(reward) + discount * following
        returns.append(following)
    return returns[::-1]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), gamma=st.sampled_from([1.0, 0.5]), turn_gamma=st.sampled_from([1.0, 0.5, 0.0]),
    advantages=st.sampled_from(["group", "gae"]),
)  # fmt: skip
def test_advantages_pass_over_inserted_tokens(data: Any, gamma: float, turn_gamma: float, advantages: Any) -> None:
    rollouts = [data.draw(conversations(sample_index=i)) for i in range(3)]
    pairs = [score(rollout, seed=i) for i, rollout in enumerate(rollouts)]
    scored = [s for s, _ in pairs]
    stats = [t for _, t in pairs]
    objective = ObjectiveConfig(
        advantages=advantages,
        lam=1.0,
        local_coef=0.0,
        gamma=gamma,
        turn_gamma=turn_gamma,
        whiten="none",
        kl_estimator="k1",
    )
    samples = make_train_samples(scored, stats, objective, kl_coef=0.1, seed=1)
    returns = [oracle_returns(s, t, objective, 0.1) for s, t in pairs]
    for i, (sample, expected_returns) in enumerate(zip(samples, returns, strict=True)):
        mask = rollouts[i].policy_mask
        assert (sample.weights == mask).all()
        assert not sample.advantages[~mask].any()
        assert not sample.returns[~mask].any()
        np.testing.assert_allclose(sample.returns[mask], expected_returns, rtol=1e-4, atol=1e-4)
        others = [other for j, other in enumerate(returns) if j != i]
        baselines = []
        for k in range(len(expected_returns)):
            returns_at_k = [other[min(k, len(other) - 1)] for other in others]
            baselines.append(np.mean(returns_at_k))
        if advantages == "gae":
            baselines = stats[i].values[mask].tolist()
        np.testing.assert_allclose(
            sample.advantages[mask], np.subtract(expected_returns, baselines), rtol=1e-4, atol=1e-4
        )


def loss_of(samples: list[TrainSample], logprobs: torch.Tensor, values: torch.Tensor, mode: Any) -> torch.Tensor:
    def numbers(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, name) for sample in samples]))

    segments = torch.arange(len(samples)).repeat_interleave(torch.tensor([len(s.response_ids) for s in samples]))
    weights = numbers("weights")
    old = numbers("old_logprobs")
    correction = importance_weights(old, numbers("rollout_logprobs"), segments, weights, mode, 2.0)
    gains = {"advantages": numbers("advantages"), "weights": weights}
    policy, _ = policy_loss(
        logprobs=logprobs, old_logprobs=old, importance_weights=correction, sequence_ids=segments,
        clip_eps=0.2, clip_eps_high=0.2, **gains
    )  # fmt: skip
    kl, _ = kl_loss(
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=numbers("ref_logprobs"),
        importance_weights=correction,
        weights=weights,
    )
    critic, _ = value_loss(
        values=values, old_values=numbers("values"), returns=numbers("returns"), weights=weights, value_clip=0.2
    )
    return policy + 0.1 * kl + critic - 0.01 * weighted_sum(-logprobs, weights)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), mode=st.sampled_from(["token", "sequence", "masked", "none"]),
    aggregation=st.sampled_from(["token", "sequence"]),
)  # fmt: skip
def test_the_loss_is_that_of_the_sampled_tokens_alone(data: Any, mode: Any, aggregation: Any) -> None:
    rollouts = [data.draw(conversations(sample_index=i)) for i in range(3)]
    for i, rollout in enumerate(rollouts):
        rollout.response_ids[0] = 100 + i  # the ids identify the response below
    pairs = [score(rollout, seed=i) for i, rollout in enumerate(rollouts)]
    objective = ObjectiveConfig(loss_aggregation=aggregation)
    train_samples = make_train_samples([s for s, _ in pairs], [t for _, t in pairs], objective, kl_coef=0.1, seed=1)
    ((samples,),) = [
        make_train_batch(train_samples, num_epochs=1, minibatches_per_epoch=1, kl_coef=0.1, seed=1).minibatches
    ]  # fmt: skip
    masks = {(s.response_ids.tobytes()): r.policy_mask for s, r in zip(train_samples, rollouts, strict=True)}
    mask = np.concatenate([masks[s.response_ids.tobytes()] for s in samples])
    generator = torch.Generator().manual_seed(3)
    logprobs = (torch.randn(len(mask), generator=generator) * 0.2 - 1).requires_grad_()
    values = torch.randn(len(mask), generator=generator).requires_grad_()
    loss = loss_of(list(samples), logprobs, values, mode)
    loss.backward()
    assert logprobs.grad is not None and values.grad is not None
    assert (logprobs.grad[~mask] == 0).all()
    assert (values.grad[~mask] == 0).all()
    assert float(np.concatenate([s.weights for s in samples]).sum()) == pytest.approx(1)

    # The same numbers as responses that hold the sampled tokens alone.
    fields = ("weights", "advantages", "returns", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    short = []
    for sample in samples:
        policy_mask = masks[sample.response_ids.tobytes()]
        arrays = {name: getattr(sample, name)[policy_mask] for name in (*fields, "response_ids")}
        short.append(TrainSample(prompt_ids=sample.prompt_ids, **arrays))
    plain = loss_of(short, logprobs.detach()[mask], values.detach()[mask], mode)
    torch.testing.assert_close(loss.detach(), plain, rtol=1e-5, atol=1e-6)


def test_metrics_and_versions_count_sampled_tokens_only() -> None:
    rollouts = [make_conversation([2, 3], [4], sample_index=i, seed=i) for i in range(2)]
    pairs = [score(rollout, seed=i) for i, rollout in enumerate(rollouts)]
    scored = [s for s, _ in pairs]
    stats = [t for _, t in pairs]
    kl = compute_step_kl(scored, stats)
    by_hand = []
    for s, t in pairs:
        gaps = t.old_logprobs - t.ref_logprobs
        by_hand.append(sum(float(gaps[i]) for i in range(9) if s.rollout.policy_mask[i]))
    assert kl == pytest.approx(np.mean(by_hand), rel=1e-5)
    prompt = Prompt(prompt_id="p", prompt_text="", task="t")
    metrics = step_metrics(
        [JudgedResponse(prompt, r, FEEDBACK) for r in rollouts], scored, stats, ObjectiveConfig(), kl=kl, kl_coef=0
    )
    assert metrics["response/length_mean"] == 5
    assert metrics["policy/entropy"] == pytest.approx(0.5)
    assert metrics["gap/logprob_mean"] < 10 < POISON
    staleness = compute_token_staleness(rollouts, policy_version=0, max_staleness=0)
    assert staleness.tolist() == [0] * 10


class Quoting(FeedbackSource):
    """Praises the first text and blames the second one, of what it sees."""

    name = "quoting"

    def __init__(self, good: str, poor: str) -> None:
        self.pieces = ([good], [poor])
        self.texts = list[str]()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.texts.append(response_text)
        return make_feedback("", *self.pieces, response_text, source=self.name, version="v")


def test_a_source_sees_the_transcript_without_thinking_and_its_offsets_count_its_characters() -> None:
    rollout = replace(make_conversation([4, 3], [2]), response_text="ttaaEEtcb", answer_start=7, metrics={"m": 1.0})
    first, last = rollout.environment_turns
    turns = replace(first, answer_start=2), replace(last, answer_start=7)
    rollout = replace(rollout, environment_turns=turns)
    source = Quoting("aa", "E" + "cb")
    prompt = Prompt(prompt_id="p", prompt_text="", task="t")
    feedback = asyncio.run(judge_answer(source, prompt, rollout))
    assert source.texts == ["aaEEcb"] and feedback.metrics == {"m": 1.0}
    assert [(s.start, s.end, s.label) for s in feedback.spans] == [(2, 4, 1), (5, 9, -1)]
    lost = asyncio.run(judge_answer(source, prompt, replace(rollout, failure="it failed")))
    assert (lost.status, lost.reason, len(source.texts)) == ("failed", "it failed", 1)


def test_a_conversation_is_kept_in_a_checkpoint(tmp_path: Path) -> None:
    rollout = replace(make_conversation([2, 3], [4]), metrics={"m": 0.5}, failure="why")
    prompt = Prompt(prompt_id="p", prompt_text="", task="t", prompt_ids=rollout.prompt_ids)
    write_groups(tmp_path / "buffer", {3: [Group(prompt=prompt, samples=((rollout, FEEDBACK),))]})
    ((restored, _),) = read_groups(tmp_path / "buffer", {"p": prompt})[3][0].samples
    for name, value in vars(rollout).items():
        np.testing.assert_array_equal(vars(restored)[name], value, strict=True)
        assert type(vars(restored)[name]) is type(value)


class Replying(FeedbackSource):
    """Judges each turn: blames the text that the reply names."""

    name = "replying"
    judges_turns = True

    def __init__(self) -> None:
        self.seen = list[tuple[str, str, list[str]]]()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        critique = prompt.payload[NEXT_MESSAGE]
        self.seen.append((response_text, critique, [message["content"] for message in prompt.messages]))
        return make_feedback(critique, [], [critique[-1]], response_text, source=self.name, version="v")


def test_each_turn_is_judged_by_the_reply_to_it() -> None:
    rollout = replace(make_conversation([4, 3], [2]), response_text="ttabEEtcb", answer_start=7, metrics={"m": 1.0})
    first, last = rollout.environment_turns
    turns = replace(first, answer_start=2, reply="wrong: a"), replace(last, answer_start=7, reply="wrong: b")
    rollout = replace(rollout, environment_turns=turns)
    prompt = Prompt(
        prompt_id="p", prompt_text="", task="t", messages=({"role": "user", "content": "Q"},), payload={"x": 1}
    )
    source = Replying()
    noisy = NoisyFeedback(source, NoiseConfig(), seed=1)
    feedback = asyncio.run(judge_answer(noisy, prompt, rollout))
    assert source.seen == [("ab", "wrong: a", ["Q"]), ("cb", "wrong: b", ["Q", "ab", "wrong: a"])]
    assert [(s.start, s.end, s.label, s.criterion) for s in feedback.spans] == [
        (2, 3, -1, "turn_1"),
        (8, 9, -1, "turn_2"),
    ]
    assert feedback.critique == "turn_1:\nwrong: a\n\nturn_2:\nwrong: b" and feedback.metrics == {"m": 1.0}
    quoted = [feedback.critique[slice(*s.critique_range)] for s in feedback.spans if s.critique_range]
    assert quoted == ["wrong: a", "wrong: b"]

    silent = replace(rollout, environment_turns=(turns[0], replace(turns[1], reply="")))
    feedback = asyncio.run(judge_answer(source, prompt, silent))
    assert feedback.usable
    assert [s.criterion for s in feedback.spans] == ["turn_1"]
    assert list_messages(rollout) == [
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "wrong: a"},
        {"role": "assistant", "content": "cb"},
    ]


class TextsSeen(Aligner):
    """Keeps the prompt texts that it gets, as a model; `read` keeps them as a function."""

    def __init__(self) -> None:
        self.texts = list[str]()

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        self.read(prompt.prompt_text, response_text)
        return make_feedback(critique, [], [], response_text, source="s", version="v")

    def read(self, prompt_text: str, response_text: str) -> tuple[str, list[str], list[str]]:
        self.texts.append(prompt_text)
        return "", [], []


def test_a_model_that_aligns_replies_reads_the_chat_before_the_turn_and_a_program_the_question() -> None:
    rollout = replace(make_conversation([4, 3], [2]), response_text="aaaaEEbbb")
    rollout = replace(rollout, environment_turns=tuple(replace(t, reply=f"no {t.tokens[0]}") for t in rollout.turns))
    chat = [{"role": "user", "content": "Q"}, *list_messages(rollout), {"role": "user", "content": "no 6"}]
    logged = [sample.prompt.prompt_text for sample in make_turn_samples([{"messages": chat}], PromptsTask())]
    prompt = Prompt(prompt_id="p", prompt_text="Q", task="t")
    for each in (prompt, replace(prompt, messages=(chat[0],))):
        model = TextsSeen()
        program = TextsSeen()
        asyncio.run(judge_answer(NextMessageFeedback(model), each, rollout))
        asyncio.run(judge_answer(NextMessageFeedback(ProgramFeedback(program.read)), each, rollout))
        assert model.texts == logged == ["Q", "user: Q\n\nassistant: aaaa\n\nuser: no 0"]
        assert program.texts == ["Q", "Q"]


def test_a_last_turn_without_an_answer_keeps_the_feedback_on_the_turns_before_it() -> None:
    rollout = replace(make_conversation([4, 3], [2]), response_text="ttabEEttt", answer_start=None, metrics={"m": 1.0})
    first, last = rollout.environment_turns
    turns = replace(first, answer_start=2, reply="wrong: a"), replace(last, answer_start=None, reply="")
    rollout = replace(rollout, environment_turns=turns)
    prompt = Prompt(prompt_id="p", prompt_text="", task="t")
    for source in (Replying(), whole := Quoting("a", "b")):
        feedback = asyncio.run(judge_answer(source, prompt, rollout))
        assert feedback.status == "ok" and feedback.metrics == {"m": 1.0}
        assert (feedback.spans[0].start, feedback.spans[0].end) == (2, 3)
    assert whole.texts == ["abEE"]

    silent = replace(rollout, environment_turns=(replace(turns[0], answer_start=None), turns[1]))
    feedback = asyncio.run(judge_answer(whole, prompt, silent))
    assert (feedback.status, feedback.spans, len(whole.texts)) == ("empty", (), 1)
    lost = replace(silent, environment_turns=(replace(silent.environment_turns[0], reply=""),))
    feedback = asyncio.run(judge_answer(Replying(), prompt, lost))
    assert feedback.usable
    assert feedback.reason == f"turn_1: {NO_ANSWER}"
    assert [*feedback.criteria] == ["turn_1"]


def test_the_reward_of_a_turn_is_the_mean_over_the_conversations_that_have_it() -> None:
    """The first turns have the rewards 1, 3 and 5; the only second one has 10, and then is not usable."""
    prompt = Prompt(prompt_id="p", prompt_text="", task="t")
    lines = list[Any]()
    for turns, rewards in (([2], [1]), ([2, 2], [3, 10]), ([2], [5])):
        rollout = make_conversation(turns, [1])
        turns_with_replies = [replace(turn, reply=f"bad: {rollout.answer_of(turn)[-1]}") for turn in rollout.turns]
        rollout = replace(rollout, environment_turns=tuple(turns_with_replies))
        feedback = asyncio.run(judge_answer(Replying(), prompt, rollout))
        names = [f"turn_{number + 1}" for number in range(len(turns))]
        assert [*feedback.criteria] == names
        assert feedback.critique.startswith("turn_1:\nbad: ")
        scored, stats = score(rollout)
        by_turn = dict(zip(names, map(float, rewards), strict=True))
        lines.append(
            (
                replace(scored, feedback=feedback, criterion_rewards=by_turn),
                stats,
                JudgedResponse(prompt, rollout, feedback),
            )
        )
    scored, stats, pairs = map(list, zip(*lines, strict=True))
    metrics = step_metrics(pairs, scored, stats, ObjectiveConfig(), kl=0, kl_coef=0)
    assert metrics["criterion_reward/turn_1"] == 3 and metrics["criterion_reward/turn_2"] == 10
    without = step_metrics(pairs, scored[::2], stats[::2], ObjectiveConfig(), kl=0, kl_coef=0)
    assert without["criterion_reward/turn_1"] == 3 and "criterion_reward/turn_2" not in without


def test_a_span_on_the_environments_text_pays_nothing_and_is_counted() -> None:
    rollout = make_conversation([2, 3], [4])
    start = rollout.environment_turns[0].characters[1]
    spans = tuple(
        Span(start=a, end=b, label=-1) for a, b in ((0, 1), (start, start + 4), (start + 3, start + 5), (1, 4))
    )
    scored, stats = score(rollout)
    prompt = Prompt(prompt_id="p", prompt_text="", task="t")
    feedback = replace(FEEDBACK, spans=spans)
    pairs = [
        JudgedResponse(prompt, rollout, feedback),
        JudgedResponse(prompt, replace(rollout, is_window_full=True), FEEDBACK),
    ]
    metrics = step_metrics(pairs, [scored], [stats], ObjectiveConfig(), kl=0, kl_coef=0)
    shares = {name: metrics[f"turns/{name}"] for name in ("mean", "window_share", "unpaid_share")}
    assert shares == {"mean": 2, "window_share": 0.5, "unpaid_share": 0.25}
