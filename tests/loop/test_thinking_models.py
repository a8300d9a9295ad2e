"""Models that think: sources, measures and rewards touch the answer alone, and a response without one is not judged."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeFeedback, FakeRollouts, LetterTask, letter_prompts, letter_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from thinking import CLOSE, OPEN, QWEN3_LIKE, R1_LIKE, build_thinking_tokenizer
from trainer_bench import Bench, job, task_reward

from actors.engines.engine import Completion
from actors.engines.rollout import RolloutWorker
from t2g.config import ModelConfig, NoiseConfig, ObjectiveConfig, RewardRuleConfig, RolloutConfig
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.errors import RunStopped, UserError
from t2g.feedback import token_offsets, token_rewards
from t2g.feedback.examples import make_policy_examples
from t2g.feedback.parse import make_feedback
from t2g.feedback.records import AnnotatedRecord
from t2g.feedback.rewards import compute_sentence_ids
from t2g.feedback.sources.noise import NoisyFeedback
from t2g.interfaces import FeedbackSource, Sampling
from t2g.loop.annotation import Annotator, Sample
from t2g.loop.sampling import judge_answer, measure, shift_spans
from t2g.loop.step_metrics import compute_fault_recall, step_metrics
from t2g.loop.steps import check_truncation_penalty, make_train_samples
from t2g.sandbox import SandboxConfig
from t2g.study.targeting import THINKING, find_criticised_quotes, label_tokens
from t2g.tasks.prompts_only import PromptsTask
from t2g.text.offsets import decode
from t2g.text.policy_chat import set_template_defaults
from t2g.text.thinking import NO_ANSWER, find_answer_start
from t2g.text.tokenizer import encode_chat
from t2g.text.transcript import compute_answer_mask
from t2g.types import JudgedResponse, Prompt, Rollout, ScoredRollout, Span, SpanFeedback, TokenStats

TAGS = (OPEN, CLOSE)
CHAT = [{"role": "user", "content": "why?"}]
PIECES = st.sampled_from(["so", " good", "\n", "bad. ", "é", "🙂", OPEN, CLOSE, " the cat"])
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_thinking_tokenizer(tmp_path_factory.mktemp("tokenizer"), special=request.param)


class Quoting(FeedbackSource):
    """Quotes given characters of what it sees, and keeps what it saw."""

    name = "program"

    def __init__(self, ranges: list[tuple[int, int, int]]) -> None:
        self.ranges = ranges
        self.texts = list[str]()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.texts.append(response_text)
        good = []
        poor = []
        for a, b, label in self.ranges:
            start, end = sorted((a % (len(response_text) + 1), b % (len(response_text) + 1)))
            if start < end:
                side = good if label == 1 else poor
                side.append(Span(start=start, end=end, label=label, critique_range=(0, 1)))
        return make_feedback("c", good, poor, response_text, source=self.name, version="1")


class Measuring(LetterTask):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float]:
        self.texts.append(response_text)
        return {"share_a": 0.5}

    def faults(self, prompt: Prompt, response_text: str) -> list[tuple[str, int, int]]:
        self.texts.append(response_text)
        return [("whole", 0, len(response_text))]


def make_rollout(tokenizer: Any, mode: str, response: str) -> Rollout:
    """Sample `response` as an engine does, after the prompt of a template with thinking on, off or open."""
    tokenizer.chat_template = R1_LIKE if mode == "open" else QWEN3_LIKE
    options = {"enable_thinking": False} if mode == "off" else None
    set_template_defaults(tokenizer, ModelConfig(policy="p", chat_template_kwargs=options))
    worker = RolloutWorker("p", RolloutConfig(), seed=1)
    worker._tokenizer = tokenizer
    worker.check_tokenizer()
    ids = np.array([*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)

    async def generate(*prompt: Any, **sampling: Any) -> Completion:
        return Completion(
            ids=ids, text=decode(tokenizer, ids), logprobs=np.zeros(len(ids), np.float32), finish_reason="stop",
            versions=((0, len(ids), 0),),
        )  # fmt: skip

    worker.generate = generate
    sampling = Sampling(num_samples=1, temperature=1.0, max_new_tokens=99, seed=1)
    return asyncio.run(worker.sample("p", np.array(encode_chat(tokenizer, CHAT), np.int32), sampling, 0))


def score(tokenizer: Any, rollout: Rollout, feedback: SpanFeedback, rule: RewardRuleConfig) -> ScoredRollout:
    offsets = token_offsets(tokenizer, rollout.response_ids)
    rewards = token_rewards(offsets, feedback.spans, text=rollout.response_text, rule=rule)
    return ScoredRollout(
        rollout=rollout,
        feedback=feedback,
        token_rewards=rewards,
        span_values=rewards,
        sentence_ids=compute_sentence_ids(offsets, rollout.response_text, r"[.\n]"),
        answer_mask=compute_answer_mask(offsets, rollout),
    )


def stats_of(scored: ScoredRollout) -> TokenStats:
    zeros = np.zeros(len(scored.rollout.response_ids), np.float32)
    return TokenStats(old_logprobs=zeros, ref_logprobs=zeros, values=zeros, entropy=zeros)


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.sampled_from([-1, 1])), max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    mode=st.sampled_from(["on", "open", "off"]),
    thinking=TEXTS.map(lambda text: text.replace(CLOSE, "")),
    does_think=st.booleans(),
    is_cut=st.booleans(),
    answer=TEXTS,
    ranges=RANGES,
    unit=st.sampled_from(["span", "token"]),
    placement=st.sampled_from(["span", "step", "scalar", "shuffled"]),
)
def test_no_span_quote_or_measure_touches_the_thinking(
    tokenizer: Any,
    mode: str,
    thinking: str,
    does_think: bool,
    is_cut: bool,
    answer: str,
    ranges: list[tuple[int, int, int]],
    unit: Any,
    placement: Any,
) -> None:
    does_think = mode == "open" or does_think
    is_cut = does_think and is_cut
    head = thinking if mode == "open" else OPEN + thinking
    response = head + ("" if is_cut else CLOSE + answer) if does_think else f"x{answer}"
    rollout = make_rollout(tokenizer, mode, response)
    source = Quoting(ranges)
    task = Measuring()
    prompt = letter_prompts(1)[0]
    feedback = asyncio.run(judge_answer(source, prompt, rollout))
    recall = compute_fault_recall(task, [JudgedResponse(prompt, rollout, feedback)])
    if is_cut:
        assert rollout.answer_start is None and rollout.is_unfinished
        assert (source.texts, task.texts, feedback.spans, feedback.status) == ([], [], (), "empty")
        assert feedback.usable and feedback.reason == NO_ANSWER and recall == {}
        assert rollout.answer == ""
    else:
        assert rollout.answer_start is not None
        seen = decode(tokenizer, tokenizer(answer, add_special_tokens=False)["input_ids"])
        expected = seen.lstrip("\r\n") if does_think else f"x{seen}"
        assert source.texts == [rollout.answer] == task.texts
        assert rollout.answer == expected
        source_spans = asyncio.run(Quoting(ranges).judge(prompt, rollout.answer)).spans  # as the source gave them
        quotes = [(rollout.answer[s.start : s.end], s.label, s.critique_range) for s in source_spans]
        text = rollout.response_text
        assert [(text[s.start : s.end], s.label, s.critique_range) for s in feedback.spans] == quotes
        assert all(s.start >= rollout.answer_start for s in feedback.spans)
        labels = {s.label for s in feedback.spans}
        assert recall.get("feedback/recall_whole", 0.0) == (-1 in labels) or not rollout.answer
        poor = frozenset(quote for quote, label, _ in quotes if label < 0)
        assert find_criticised_quotes(text, feedback) == poor
        asyncio.run(measure(task, prompt, rollout.answer, SandboxConfig(), asyncio.Semaphore(1)))
        assert task.texts[-1] == rollout.answer
    rule = RewardRuleConfig(unit=unit, placement=placement)
    scored = score(tokenizer, rollout, feedback, rule)
    first = int((~scored.answer_mask).sum())
    assert not scored.answer_mask[:first].any()
    ends = token_offsets(tokenizer, rollout.response_ids)[:first, 1]
    assert not ends.size or ends[-1] <= (len(rollout.response_text) if is_cut else rollout.answer_start)
    assert not scored.token_rewards[:first].any()
    assert set(label_tokens(tokenizer, rollout, feedback)[:first].tolist()) <= {THINKING}
    objective = ObjectiveConfig(
        advantages="gae", gamma=1e-9, lam=0, whiten="none", kl_estimator="k3", rewards=rule, train_thinking=False
    )
    if first < len(rollout.response_ids):
        (sample,) = make_train_samples([scored], [stats_of(scored)], objective, kl_coef=0, seed=1)
        assert not sample.advantages[:first].any()  # with gamma 0 the advantage of a token is its own reward
        np.testing.assert_allclose(sample.advantages.sum(), scored.token_rewards.sum(), atol=1e-6)
        assert sample.weights.tolist() == [0.0] * first + [1.0] * (len(rollout.response_ids) - first)


def test_a_shift_moves_spans_and_not_their_critique_ranges() -> None:
    span = Span(start=1, end=3, label=-1, severity=2, critique_range=(4, 9), fix="b")
    feedback = SpanFeedback(critique="long critique", spans=(span,), status="ok", source="s", version="v")
    (shifted,) = shift_spans(feedback, 7).spans
    assert shifted == replace(span, start=8, end=10)
    assert shift_spans(shift_spans(feedback, 7), -7) == feedback
    assert shift_spans(feedback, 0) is feedback


def test_noise_stays_in_the_answer(tokenizer: Any) -> None:
    rollout = make_rollout(tokenizer, "on", "<think>so good the cat</think>so good")
    noise = NoisyFeedback(Quoting([(0, 2, 1), (3, 7, -1)]), NoiseConfig(move=1.0), seed=3)
    feedback = asyncio.run(judge_answer(noise, letter_prompts(1)[0], rollout))
    assert feedback.spans
    assert all(span.start >= rollout.answer_start for span in feedback.spans)


# --------------------------------------------------------------------------------------------------------- the loop
class ThinkingRollouts(FakeRollouts):
    """Responses whose thinking ends with the first c; without a c they end within their thinking."""

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        sampled = await super()._sample(prompt, sampling)
        starts = [r.response_text.find("c") + 1 or None for r in sampled]
        return [replace(r, answer_start=start, finish_reason="stop") for r, start in zip(sampled, starts, strict=True)]


class Recording(FakeFeedback):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.texts.append(response_text)
        return await super().judge(prompt, response_text)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("letters"))


@pytest.mark.parametrize("train_thinking", [True, False])
def test_a_run_of_a_model_that_thinks(letters: Any, tmp_path: Path, train_thinking: bool) -> None:
    config = job(
        truncation_penalty=-2.0, outcome_rewards=task_reward(0.5), train_thinking=train_thinking, max_staleness=1
    )
    bench = Bench(tmp_path, letters, config, rollouts=ThinkingRollouts(letters))
    bench.trainer.feedback = bench.trainer.train_feedback = bench.feedback = Recording()
    bench.run()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    unanswered = [line for line in lines if "c" not in line["response"]]
    assert unanswered and len(unanswered) < len(lines)
    for line in lines:
        text = line["response"]
        feedback = line["feedback"]
        start = text.find("c") + 1
        if not start:
            assert (feedback["status"], feedback["reason"], feedback["spans"]) == ("empty", NO_ANSWER, [])
            assert line["token_rewards"] == [0.0, 0.0, 0.0, -2.0]
        else:
            paid = [{"a": 1.0, "b": -1.0}.get(letter, 0.0) * (i >= start) for i, letter in enumerate(text)]
            assert line["token_rewards"] == paid
            assert all(span["start"] >= start for span in feedback["spans"])
    assert bench.feedback.texts
    assert max(map(len, bench.feedback.texts)) < 4  # an answer has at most 3 of 4 letters
    metrics = bench.metrics()[1:]
    assert all(line["dropped/samples"] == 0 for line in metrics)  # what is not judged is trained on
    shares = [line["response/unanswered_share"] for line in metrics]
    alarms = (tmp_path / "alarms.jsonl").read_text()
    assert max(shares) > 0
    assert ("end within their thinking" in alarms) == (max(shares) > 0.25)
    trained = [sample for batch in bench.learner.batches for m in batch.minibatches for sample in m]
    c = letters.convert_tokens_to_ids("c")
    for sample in trained:
        ids = sample.response_ids.tolist()
        is_thinking = [c not in ids[:t] for t in range(len(ids))]
        if train_thinking:
            assert (sample.weights > 0).all()
        else:
            assert [weight == 0 for weight in sample.weights] == is_thinking


def scored_answer() -> tuple[Rollout, ScoredRollout]:
    """Return a response of two tokens of thinking and an answer with a good and a poor token."""
    ids = np.zeros(4, np.int32)
    rollout = Rollout(
        prompt_id="p", sample_index=0, prompt_ids=ids, response_ids=ids, rollout_logprobs=np.zeros(4, np.float32),
        response_text="ccab", finish_reason="stop", policy_versions=((0, 4, 0),), answer_start=2,
    )  # fmt: skip
    feedback = SpanFeedback(critique="", spans=(), status="ok", source="s", version="")
    rewards = np.array([0, 0, 1, -1], np.float32)
    scored = ScoredRollout(
        rollout=rollout,
        feedback=feedback,
        token_rewards=rewards,
        span_values=rewards,
        sentence_ids=np.zeros(4, np.int32),
        answer_mask=np.array([False, False, True, True]),
    )
    return rollout, scored


def test_label_shares_are_of_answer_tokens() -> None:
    rollout, scored = scored_answer()
    pairs = [JudgedResponse(letter_prompts(1)[0], rollout, scored.feedback)]
    metrics = step_metrics(pairs, [scored], [stats_of(scored)], ObjectiveConfig(), kl=0, kl_coef=0)
    assert [metrics[f"tokens/{name}_share"] for name in ("good", "poor", "neutral")] == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(("starts", "share"), [((2, None), 0.5), ((None,), 1.0), ((2,), 0.0), ((0, 0), None)])
def test_responses_without_an_answer_are_counted_for_models_that_think(
    starts: tuple[int | None, ...], share: float | None
) -> None:
    prompt = letter_prompts(1)[0]
    (judged, scored) = scored_answer()
    pairs = [JudgedResponse(prompt, replace(judged, answer_start=start), scored.feedback) for start in starts]
    metrics = step_metrics(pairs, [scored], [stats_of(scored)], ObjectiveConfig(), kl=0, kl_coef=0)
    assert metrics.get("response/unanswered_share") == share


def test_a_step_in_which_nothing_is_trained_stops_with_its_reason(letters: Any) -> None:
    ids = np.zeros(2, np.int32)
    rollout = Rollout(
        prompt_id="p", sample_index=0, prompt_ids=ids, response_ids=ids, rollout_logprobs=np.zeros(2, np.float32),
        response_text="aa", finish_reason="length", policy_versions=((0, 2, 0),), answer_start=None,
    )  # fmt: skip
    feedback = SpanFeedback(critique="", spans=(), status="empty", source="s", version="")
    scored = [replace(score(letters, replace(rollout, sample_index=i), feedback, RewardRuleConfig())) for i in (0, 1)]
    objective = ObjectiveConfig(truncation_penalty=-1, train_thinking=False)
    with pytest.raises(RunStopped, match="every response ended within its thinking"):
        make_train_samples(scored, [stats_of(s) for s in scored], objective, kl_coef=0, seed=1)
    samples = make_train_samples(
        scored, [stats_of(s) for s in scored], ObjectiveConfig(truncation_penalty=-1), kl_coef=0, seed=1
    )
    assert all((sample.weights == 1).all() for sample in samples)


def test_silence_must_cost_something_where_a_model_thinks(tokenizer: Any) -> None:
    def check(mode: str, penalty: float, tags: tuple[str, ...] | None = None) -> None:
        rollout = make_rollout(tokenizer, mode, "a")
        prompts = [replace(letter_prompts(1)[0], prompt_ids=rollout.prompt_ids)]
        check_truncation_penalty(tokenizer, prompts, ModelConfig(policy="my/model", thinking_tags=tags), penalty)

    for mode in ("on", "open"):
        check(mode, -0.1)
        check(mode, 0, tags=())
        with pytest.raises(
            UserError, match=r"^my/model may think before </think>, and with objective.truncation_penalt"
        ):
            check(mode, 0)
    check("off", 0)


def test_a_buffer_keeps_the_answer_and_an_old_one_has_none(tmp_path: Path, letters: Any) -> None:
    prompt = letter_prompts(1)[0]
    sampling = Sampling(num_samples=30, temperature=1.0, max_new_tokens=4, seed=3)
    rollouts = asyncio.run(ThinkingRollouts(letters).sample(prompt, sampling))
    feedback = SpanFeedback(critique="", spans=(), status="empty", source="s", version="")
    group = Group(prompt=prompt, samples=tuple((rollout, feedback) for rollout in rollouts))
    write_groups(tmp_path / "new", {1: [group]})
    starts = [rollout.answer_start for rollout in rollouts]
    assert None in starts and len(set(starts)) > 2
    (read,) = read_groups(tmp_path / "new", {prompt.prompt_id: prompt})[1]
    assert [rollout.answer_start for rollout, _ in read.samples] == starts
    records = json.loads((tmp_path / "new" / "groups.json").read_text())
    for sample in records[0]["samples"]:
        del sample["answer_start"]  # as before models could think
    (tmp_path / "new" / "groups.json").write_text(json.dumps(records))
    (old,) = read_groups(tmp_path / "new", {prompt.prompt_id: prompt})[1]
    assert {rollout.answer_start for rollout, _ in old.samples} == {0}


# ------------------------------------------------------------------------------------- annotation, supervised training
def test_a_record_holds_the_answer_and_one_without_is_not_judged() -> None:
    prompt = letter_prompts(1)[0]
    source = Recording()

    async def answers(prompt: Prompt) -> list[str | None]:
        return ["ab", None]

    annotator = Annotator(source, answers)

    async def make_record(index: int) -> AnnotatedRecord:
        return await annotator.judge("", await annotator.respond(Sample(prompt, index)))

    async def make_records() -> list[AnnotatedRecord]:
        return [await make_record(index) for index in range(2)]

    records = asyncio.run(make_records())
    assert source.texts == ["ab"]
    assert [record.response for record in records] == ["ab", ""]
    assert (records[1].status, records[1].reason, records[1].usable) == ("unparsable", NO_ANSWER, False)
    assert {(span.start, span.end) for span in records[0].spans} == {(0, 1), (1, 2)}


def test_a_reference_is_the_answer_and_not_the_thinking(tmp_path: Path) -> None:
    record = {"prompt": "why?", "reference": "so good"}
    full = {"prompt": "why?", "reference": "the cat</think>so good"}

    def targets(template: str, rows: list[dict[str, str]], tags: Any = TAGS, max_length: int = 200) -> list[str]:
        tokenizer = build_thinking_tokenizer(tmp_path, template=template)

        class Referenced(PromptsTask):
            def reference(self, record: Any) -> str:
                return record["reference"]

        examples = make_policy_examples(rows, Referenced(), tokenizer, max_length=max_length, tags=tags)
        for example in examples:
            assert len(example.weights) == len(example.response_ids)
            assert (example.weights == 1).all()
            assert example.response_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")  # the template's
            assert len(example) <= max_length
            text = decode(tokenizer, example.response_ids)
            start = find_answer_start(tokenizer, example.prompt_ids, example.response_ids, text, TAGS)
            assert tags is None or text[start:] == "so good"  # what a sample of it would be judged by
        return [decode(tokenizer, example.response_ids) for example in examples]

    assert targets(QWEN3_LIKE, [record]) == ["so good"] == targets(QWEN3_LIKE, [record], tags=None)
    assert targets(R1_LIKE, [record, full]) == ["\n</think>\n\nso good", "the cat</think>so good"]
    assert targets(R1_LIKE, [record], tags=None) == ["so good"]
