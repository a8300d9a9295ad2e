import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from t2g.config import LogConfig
from t2g.errors import UserError
from t2g.metrics import format_step, pair_evaluations, select_held_out
from t2g.runs.log import ALARMS_FILE, DROPPED_FILE, METRICS_FILE, SAMPLES_FILE, RunLog, SampleRow, Sink, read_records
from t2g.types import Prompt, Rollout, ScoredRollout, Span, SpanFeedback

PLAIN = LogConfig(num_samples=2)


class FakeSink(Sink):
    def __init__(self) -> None:
        self.first_steps: list[int] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[int, str, int]] = []

    def start(self, first_step: int) -> None:
        self.first_steps.append(first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, dict(metrics)))

    def log_samples(self, step: int, split: str, rows: Sequence[SampleRow]) -> None:
        self.tables.append((step, split, len(rows)))


def test_an_evaluation_has_the_training_reward_since_the_one_before() -> None:
    steps = [{"eval/x": 0.5}, *({"reward/total_mean": float(r)} for r in (1, 2, 6)), {"eval/x": 0.25}, {"eval/x": 9.0}]
    steps += [{"reward/total_mean": None}, {"reward/total_mean": 4.0, "eval/x": 0.75}, {"eval/x": None}]
    assert pair_evaluations(steps, "eval/x") == [(3.0, 0.25), (4.0, 0.75)]


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def judged(index: int, status: str = "ok", text: str = "hé") -> tuple[Prompt, Rollout, SpanFeedback]:
    ids = np.array([*tokenizer()(text)["input_ids"], tokenizer().eos_token_id], np.int32)
    prompt = Prompt(prompt_id=f"p{index}", prompt_ids=ids, prompt_text=f"question {index}", task="tiny")
    rollout = Rollout(
        prompt_id=f"p{index}",
        sample_index=0,
        prompt_ids=ids,
        response_ids=ids,
        rollout_logprobs=np.zeros(len(ids), np.float32),
        response_text=text,
        finish_reason="stop",
        policy_versions=((0, len(ids), 0),),
    )
    spans = (Span(start=1, end=2, label=-1, critique_range=(0, 3)),)
    feedback = SpanFeedback(critique="bad", spans=spans, status=status, source="program", version="v")
    return prompt, rollout, feedback


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_stands_once_after_a_resume(tmp_path: Path) -> None:
    log = RunLog(tmp_path, PLAIN)
    assert log.truncate(0) == []
    for step in range(6):
        log.write_step(step, {"policy/kl": step / 4})
        log.write_samples(step, "eval", [judged(0)])
        log.write_dropped(step, [{"prompt_id": "p", "sample_index": None, "reason": "why"}] * 2)
        log.write_alarms(step, ["high"] if step % 2 else [])
    resumed = RunLog(tmp_path, PLAIN)
    history = resumed.truncate(4)  # the last checkpoint was that of step 3
    assert history == [{"step": s, "policy/kl": s / 4} for s in range(4)]
    for step in (4, 5, 6):
        resumed.write_step(step, {"policy/kl": -1.0})
    records = lines(tmp_path / METRICS_FILE)
    assert [r["step"] for r in records] == [*range(7)]
    assert [r["policy/kl"] for r in records] == [0, 1 / 4, 2 / 4, 3 / 4, -1, -1, -1]
    assert [r["step"] for r in lines(tmp_path / SAMPLES_FILE)] == [0, 1, 2, 3]
    assert lines(tmp_path / ALARMS_FILE) == [{"step": 1, "alarm": "high"}, {"step": 3, "alarm": "high"}]
    assert [r["step"] for r in lines(tmp_path / DROPPED_FILE)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert lines(tmp_path / DROPPED_FILE)[0] == {"step": 0, "prompt_id": "p", "sample_index": None, "reason": "why"}


@settings(deadline=None)
@given(cut=st.integers(0, 200), first_step=st.integers(0, 6))
def test_a_torn_last_line_never_costs_another_one(
    tmp_path_factory: pytest.TempPathFactory, cut: int, first_step: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    whole = b"".join(json.dumps({"step": s, "x": s / 8}).encode() + b"\n" for s in range(5))
    torn = whole[: len(whole) - min(cut, len(whole))]
    (folder / METRICS_FILE).write_bytes(torn)
    complete = torn.count(b"}")  # an object whose newline is missing is whole
    history = RunLog(folder, PLAIN).truncate(first_step)
    assert history == [{"step": s, "x": s / 8} for s in range(min(complete, first_step))]
    assert lines(folder / METRICS_FILE) == history


@pytest.mark.parametrize("bad", ["{broken", "[1, 2]", '{"no": 1}', '{"step": "x"}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a JSON object with a step"):
        list(read_records(path))


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path, PLAIN)
    log.truncate(0)
    log.write_step(1, {"a": float("nan"), "b": float("-inf"), "c": np.float32(0.5)})
    assert lines(tmp_path / METRICS_FILE) == [{"step": 1, "a": None, "b": None, "c": 0.5}]


@pytest.mark.parametrize("name", [METRICS_FILE, SAMPLES_FILE, DROPPED_FILE])
def test_a_full_disk_is_one_sentence(tmp_path: Path, name: str) -> None:
    log = RunLog(tmp_path, PLAIN)
    log.truncate(0)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/full")  # the kernel's own "No space left on device"
    write = {
        METRICS_FILE: lambda: log.write_step(1, {"a": 0.5}),
        SAMPLES_FILE: lambda: log.write_samples(1, "eval", [judged(0)]),
        DROPPED_FILE: lambda: log.write_dropped(1, [{"prompt_id": "p"}]),
    }
    with pytest.raises(UserError, match=rf"^{name} cannot be written to "):
        write[name]()


def test_a_step_cannot_be_logged_twice(tmp_path: Path) -> None:
    log = RunLog(tmp_path, PLAIN)
    log.truncate(3)
    log.write_step(3, {})
    with pytest.raises(AssertionError, match="step 3 was logged before"):
        log.write_step(3, {})


def test_samples_hold_critique_spans_and_tokens(tmp_path: Path) -> None:
    log = RunLog(tmp_path, PLAIN)
    log.truncate(0)
    triples = [judged(i, "failed" if i == 2 else "ok") for i in range(4)]
    rewards = np.array([0, -1, -1, 0], np.float32)  # h, two bytes of é, EOS
    scored = [
        ScoredRollout(
            rollout=r,
            feedback=f,
            token_rewards=rewards,
            span_values=rewards,
            sentence_ids=np.zeros(4, np.int32),
            answer_mask=np.ones(4, bool),
        )
        for _, r, f in triples
        if f.status == "ok"
    ]
    advantages = [np.array([0.5, i, 1 / 3, 0], np.float32) for i in range(len(scored))]
    log.write_samples(7, "train", triples, scored, tokenizer(), {"token_advantages": advantages})
    first, second = lines(tmp_path / SAMPLES_FILE)  # two of four, evenly: p0 and p2
    expected = {
        "step": 7,
        "split": "train",
        "prompt_id": "p0",
        "sample_index": 0,
        "prompt": "question 0",
        "response": "hé",
        "finish_reason": "stop",
        "feedback": {
            "critique": "bad",
            "spans": [{"start": 1, "end": 2, "label": -1, "severity": 1, "critique_range": [0, 3]}],
            "status": "ok",
            "source": "program",
            "version": "v",
            "num_quotes": 0,
            "num_located": 0,
            "execution": {},
            "agreement": None,
            "reason": "",
            "metrics": {},
        },
        "token_ranges": [[0, 1], [1, 2], [1, 2], [2, 2]],
        "token_texts": ["h", "é", "é", ""],
        "token_rewards": [0.0, -1.0, -1.0, 0.0],
        "token_advantages": [0.5, 0.0, 0.33333, 0.0],
    }
    assert first == expected
    assert second["prompt_id"] == "p2"
    assert second["feedback"]["status"] == "failed"
    assert "token_rewards" not in second


def test_held_out_samples_go_with_the_feedback_there_is(tmp_path: Path) -> None:
    log = RunLog(tmp_path, LogConfig(num_samples=3))
    log.truncate(0)
    triples = [judged(i) for i in range(5)]
    log.write_samples(0, "eval", [triples[0], *((p, r, None) for p, r, _ in triples[1:3])])
    log.write_samples(1, "eval", triples[:1])
    written = [(r["step"], r["prompt_id"], r["feedback"] is not None) for r in lines(tmp_path / SAMPLES_FILE)]
    assert written == [(0, "p0", True), (0, "p1", False), (0, "p2", False), (1, "p0", True)]
    assert {r["split"] for r in lines(tmp_path / SAMPLES_FILE)} == {"eval"}


def test_no_samples_are_kept_when_none_are_wanted(tmp_path: Path) -> None:
    log = RunLog(tmp_path, LogConfig(num_samples=0))
    log.truncate(0)
    log.write_samples(1, "train", [judged(0)])
    assert (tmp_path / SAMPLES_FILE).read_text() == ""


def test_text_without_utf8_can_be_logged(tmp_path: Path) -> None:
    log = RunLog(tmp_path, PLAIN)
    log.truncate(0)
    prompt, rollout, _ = judged(0)
    odd = Prompt(prompt_id="p", prompt_ids=prompt.prompt_ids, prompt_text="\ud800\u2028\n\0", task="tiny")
    log.write_samples(1, "eval", [(odd, rollout, None)])
    assert [r["prompt"] for r in read_records(tmp_path / SAMPLES_FILE)] == ["\ud800\u2028\n\0"]


def test_sinks_get_every_step_and_tables_of_some(tmp_path: Path) -> None:
    sink = FakeSink()
    log = RunLog(tmp_path, PLAIN, [sink])
    log.truncate(1)
    for step in range(1, 12):
        log.write_samples(step, "train", [judged(index) for index in range(3)])
        log.write_step(step, {"a": step / 4})
    log.write_samples(12, "eval", [judged(0)])
    assert sink.first_steps == [1]
    assert sink.steps == [(step, {"a": step / 4}) for step in range(1, 12)]
    assert sink.tables == [(1, "train", 2), (10, "train", 2), (12, "eval", 1)]


def test_step_line_is_one_line_of_what_there_is() -> None:
    step = {
        "reward/token_mean": -0.0125,
        "tokens/good_share": 0.125,
        "tokens/poor_share": 0.0625,
        "tokens/neutral_share": 0.8125,
        "policy/kl": 1.5,
        "policy/entropy": 0.75,
        "policy/clip_share": 0.02,
        "policy/grad_norm": 1.0,
        "response/length_mean": 45.25,
        "response/truncated_share": 0.125,
        "gap/logprob_mean": 3e-6,
        "speed/tokens_per_s": 812.4,
        "time/generate_s": 3.14,
        "time/feedback_s": 5.0,
        "time/learn_s": 4.0,
        "time/sync_s": 0.1,
        "eval/fact_f1": 0.7125,
        "eval/score": None,
    }
    assert format_step(12, step) == (
        "step 12 | reward -0.013 | good 12.5% | poor 6.2% | neutral 81.2% | KL 1.500 | entropy 0.750 | "
        "PPO-clipped 2.0% | length 45.2 | truncated 12.5% | gap 3.0e-06 | 812 tokens/s | generate 3.1s | "
        "feedback 5.0s | learn 4.0s | sync 0.1s | eval fact_f1 0.713"
    )
    assert format_step(0, {"policy/kl": None}) == "step 0"
    assert select_held_out(step) == {"fact_f1": 0.7125}
