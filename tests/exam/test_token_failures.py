"""Exam of silent failures: engine and learner that do not mean the same tokens, or not the same distribution."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeRollouts, letter_tokenizer
from models import random_model
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing
from trainer_bench import Bench, job

from t2g.config import EngineConfig, PolicyJob, with_overrides
from t2g.environments import Reply
from t2g.environments.converse import converse, make_encoder
from t2g.errors import UserError
from t2g.interfaces import Sampling
from t2g.tasks.tiny.assets import END, build_tokenizer
from t2g.text.offsets import decode
from t2g.text.tokenizer import encode_chat, load_tokenizer
from t2g.types import Prompt, Rollout

GAP_ALARM = "log-probabilities of engines and learner differ"
BOS = "<|user|>"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class TruncatedRollouts(FakeRollouts):
    """Samples with top-k: without the least likely letter, and with the log-probabilities of what is left."""

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        whole = self.logits
        least = whole.argmin(-1, keepdim=True)
        self.logits = whole.scatter(-1, least, -40.0)
        rollouts = await super()._sample(prompt, sampling)
        self.logits = whole
        return rollouts


class ForgetfulRollouts(FakeRollouts):
    """Wakes up with the weights of the start once it has version 2, and still reports the version that was sent."""

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        if self.version == 2:
            self.logits = torch.zeros_like(self.logits)
        return await super()._sample(prompt, sampling)


@pytest.mark.parametrize(
    ("engine", "overrides", "steps"),
    [
        (FakeRollouts, {}, []),
        (FakeRollouts, {"rollout.max_staleness": 1}, []),  # tokens of earlier weights do not count
        (FakeRollouts, {"rollout.temperature": 0.6}, [2]),  # the learner of the bench has 1; the first table is flat
        (TruncatedRollouts, {}, [1]),
        (ForgetfulRollouts, {}, [3]),
    ],
)
def test_another_distribution_in_the_engine_raises_an_alarm(
    engine: type[FakeRollouts], overrides: dict[str, Any], steps: list[int], tokenizer: Any, tmp_path: Path
) -> None:
    config = with_overrides(job(), {"num_steps": 3} | overrides)
    bench = Bench(tmp_path, tokenizer, config, rollouts=engine(tokenizer))
    bench.run()
    assert bench.alarms(GAP_ALARM) == steps
    gaps = [step["gap/current_mean"] for step in bench.metrics()[1:] if "gap/current_mean" in step]
    assert (max(gaps) > 1e-3) == bool(steps)


@pytest.mark.parametrize("name", ["generation_config", "override_generation_config", "logprobs_mode"])
def test_sampling_parameters_that_the_learner_does_not_know_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="samples and their logprobs would differ from what is trained"):
        EngineConfig(engine_args={name: {"top_p": 0.9}})
    with pytest.raises(ValidationError, match="top_p"):
        PolicyJob.model_validate({**job().model_dump(include={"model", "data"}), "rollout": {"top_p": 0.9}})


def with_bos(tokenizer: Any, template: str) -> Any:
    """Make the tokenizer add BOS to each text itself, as Llama's does, and give it a template."""
    tokenizer.bos_token = BOS
    tokenizer.chat_template = template
    special = [(BOS, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=special)
    return tokenizer


def test_the_tokenizer_adds_no_bos_to_that_of_the_template(tmp_path: Path) -> None:
    tokenizer = with_bos(build_tokenizer(tmp_path, ["x"], vocab_size=261), TEMPLATE)
    text = tokenizer.apply_chat_template(HELLO, tokenize=False)
    assert tokenizer(text)["input_ids"][:2] == [tokenizer.bos_token_id] * 2, "what others do"
    assert encode_chat(tokenizer, HELLO).count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("template", "is_refused"), [(TEMPLATE, False), (f"{BOS}{TEMPLATE}", True)], ids=["one", "two"]
)
def test_a_chat_that_begins_with_two_bos_is_refused(template: str, is_refused: bool, tmp_path: Path) -> None:
    model = random_model(tmp_path)
    with_bos(load_tokenizer(str(model)), template).save_pretrained(model)
    if not is_refused:
        assert load_tokenizer(str(model)).bos_token == BOS
        return
    with pytest.raises(UserError, match=r"begin with two BOS tokens \('<\|user\|>', id \d+\)"):
        load_tokenizer(str(model))


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    model = random_model(tmp_path)
    larger = load_tokenizer(str(model))
    num_rows = len(larger)
    larger.add_tokens(["another"])
    larger.save_pretrained(model)
    with pytest.raises(UserError, match=rf"'another' with id {num_rows}; the model has {num_rows} rows"):
        load_tokenizer(str(model))


class UnnamedRollouts(FakeRollouts):
    """The model has a row for a letter that the tokenizer lacks."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.tokenizer = tokenizer
        self.ids[2] = 5000

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        rollouts = await super()._sample(prompt, sampling)
        return [replace(rollout, response_text=decode(self.tokenizer, rollout.response_ids)) for rollout in rollouts]


def test_ids_that_the_tokenizer_cannot_name_raise_an_alarm(tokenizer: Any, tmp_path: Path) -> None:
    config = with_overrides(job(), {"num_steps": 2})
    bench = Bench(tmp_path, tokenizer, config, rollouts=UnnamedRollouts(tokenizer))
    bench.run()
    ids = np.concatenate([rollout.response_ids for rollout in bench.learner.seen[0]])
    share = bench.metrics()[1]["tokens/unnamed_share"]
    assert share == pytest.approx(np.mean(ids == 5000)) and 0.1 < share < 0.6
    assert bench.alarms("the tokenizer has no token for") == [1]


class Again:
    """An environment of two turns."""

    timeout_s = 1.0

    async def reply(self, prompt: Prompt, messages: Any) -> Reply:
        return Reply("go on", done=len(messages) > 2)


def test_the_next_turn_continues_the_sampled_ids_and_not_their_text(tmp_path: Path) -> None:
    """The policy samples `the` in three tokens, and the tokenizer has one for it."""
    tokenizer = build_tokenizer(tmp_path, ["the the the"], vocab_size=300)
    sampled = np.array(tokenizer.convert_tokens_to_ids([*"the", END]), np.int32)
    text = decode(tokenizer, sampled)
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) < len("the")
    contexts: list[np.ndarray] = []

    async def sample_turn(context: np.ndarray, number: int) -> Rollout:
        contexts.append(context)
        return Rollout(
            prompt_id="p", sample_index=0, prompt_ids=context, response_ids=sampled,
            rollout_logprobs=np.full(len(sampled), -1, np.float32), response_text=text, finish_reason="stop",
            policy_versions=((0, len(sampled), 0),),
        )  # fmt: skip

    prompt_ids = np.array(encode_chat(tokenizer, HELLO), np.int32)
    prompt = Prompt(prompt_id="p", prompt_text="Hello", task="t", prompt_ids=prompt_ids)
    encode: Callable[..., Any] = make_encoder(tokenizer)
    rollout = asyncio.run(converse(prompt, sample_turn, Again(), encode, max_turns=3, max_context_tokens=1000))
    start = len(prompt_ids)
    np.testing.assert_array_equal(contexts[1][start : start + len(sampled)], sampled)
    for turn in rollout.environment_turns:
        np.testing.assert_array_equal(rollout.response_ids[slice(*turn.tokens)], sampled)
    assert (rollout.rollout_logprobs[rollout.policy_mask] == -1).all()
