"""The span reward model on vLLM workers, with its own tokenizer and guided decoding.

The grammar allows exactly the JSON that the model is trained to write (`t2g.feedback.grammar.make_answer_grammar`).
`RewardWorker` is the remote side, `RewardFleet` the driver's, which implements `t2g.interfaces.FeedbackSource`.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.engines.engine import Engine
from actors.fleet.fleet import REQUEST_TRIES, Fleet
from t2g.config import RewardEngineConfig, SourceConfig
from t2g.errors import SamplingFailed, UserError
from t2g.feedback.card import check_card, make_card
from t2g.feedback.examples import encode_target
from t2g.feedback.grammar import make_answer_grammar
from t2g.feedback.parse import format_answer_prefix, make_failed_feedback, parse_answer
from t2g.feedback.reward_prompt import build_feedback_prompt
from t2g.runs.contents import format_model_label
from t2g.tasks.base import Task
from t2g.text.offsets import decode
from t2g.types import Prompt, SpanFeedback

logger = logging.getLogger(__name__)

SOURCE = "reward_model"
MAX_CACHED_ANSWERS = 4096
BLANK = Prompt(prompt_id="(none)", prompt_text="", task="")


class RewardWorker(Engine):
    """One reward engine. `start` raises UserError if the instructions do not fit, or without a chat template."""

    _config: RewardEngineConfig

    def __init__(self, config: SourceConfig, task: Task, seed: int, version: str) -> None:
        assert config.reward_model is not None
        super().__init__(config.reward_model, config.engine, seed=seed, revision=config.reward_revision, guided=True)
        self._style = config.style
        self._task = task
        self._version = version
        self._guide = self._grammar()

    def check_tokenizer(self) -> None:
        self._prompt_ids(BLANK, "", self._config.max_prompt_tokens)

    async def judge(
        self, prompt: Prompt, response_text: str, *, critique: str | None = None, guided: bool = True
    ) -> SpanFeedback:
        """Judge one response. Decoding is greedy: the same response gets the same critique.

        The complete quotes of a truncated answer are kept, see `parse_answer`.

        Args:
            critique: A critique by another annotator. The answer begins with it, and the model adds the span map.

        Raises:
            UserError: Response and critique do not fit beside the instructions.
        """
        prefix_ids = np.zeros(0, np.int32)
        prefix = ""
        grammar = self._guide
        if critique is not None:
            full_prefix = format_answer_prefix(critique)
            prefix_ids, prefix = begin_answer(full_prefix, self._tokenizer)
            grammar = self._grammar(full_prefix[len(prefix) :])
        room = self._config.max_prompt_tokens - len(prefix_ids)
        if room <= 0:
            raise UserError(
                f"prompt {prompt.prompt_id}: its critique of {len(prefix_ids)} tokens leaves no room in a prompt of "
                f"{self._config.max_prompt_tokens} tokens; raise max_model_len of the reward engine"
            )
        ids = self._prompt_ids(prompt, response_text, room)
        done = await self.generate(
            np.concatenate([ids, prefix_ids]),
            temperature=0.0,
            max_new_tokens=self._config.max_new_tokens,
            seed=None,
            guide={"grammar": grammar} if guided else None,
        )
        return parse_answer(
            prefix + done.text,
            response_text,
            source=SOURCE,
            version=self._version,
            finish_reason=done.finish_reason,
            style=self._style,
            max_spans=self._config.max_spans,
        )

    def _prompt_ids(self, prompt: Prompt, response_text: str, room: int) -> np.ndarray:
        return build_feedback_prompt(self._task, prompt, response_text, self._tokenizer, room, style=self._style)

    def _grammar(self, critique_suffix: str | None = None) -> str:
        return make_answer_grammar(
            max_critique_chars=self._config.max_critique_chars,
            max_spans=self._config.max_spans,
            max_quote_chars=self._config.max_quote_chars,
            style=self._style,
            critique_suffix=critique_suffix,
        )


def begin_answer(prefix: str, tokenizer: Any) -> tuple[np.ndarray, str]:
    """Return the tokens of an answer's prefix as in training, [P] int32, and their text.

    The model writes the last token itself: in training it may also contain the next characters, such as a full stop and
    the quotation mark after it. No character is split between tokens.
    """
    ids = encode_target(prefix, tokenizer)[:-2]
    while not prefix.startswith(text := decode(tokenizer, ids)):
        ids = ids[:-1]
    return ids, text


RewardActor = ray.remote(RewardWorker)


class RewardFleet(Fleet):
    """Reward workers as a feedback source and aligner. Answers are cached for equal requests."""

    name = SOURCE
    role = "reward"
    actor = RewardActor
    judgement_cache_key = ""
    judges_turns = False

    def __init__(self, config: SourceConfig, task: Task, *, seed: int, placement_timeout_s: float) -> None:
        """Raises UserError if the model was trained for another task or style; see `t2g.feedback.card`."""
        assert config.reward_model is not None
        card = make_card(task, config.style)
        check_card(Path(config.reward_model), card)
        model = format_model_label(config.reward_model, config.reward_revision)
        self.version = f"{model}/{card.prompt_version}"
        self._model = config.reward_model
        self._writes_critiques = config.style.critique
        engine = config.engine
        caller_timeout_s = engine.timeout_scale * config.timeout_s
        self._timeout_s = min(engine.deadline_s, caller_timeout_s / REQUEST_TRIES)
        # By prompt, response and critique: ids are no key, since held-out prompts may have the ids of others.
        self._cache: dict[tuple[str, str, str | None], SpanFeedback] = {}
        arguments = {"config": config, "task": task, "seed": seed, "version": self.version}
        super().__init__(arguments, config.engine, placement_timeout_s=placement_timeout_s)

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Judge one response.

        The feedback is failed if no worker answers in time, or the response is too long for the reward model's window.

        Raises:
            RunStopped: No worker is left.
        """
        return await self._judge_cached(prompt, response_text, None)

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """Return the spans of a critique by another annotator; otherwise as `judge`.

        Raises:
            UserError: The reward model was trained without critiques.
        """
        if not self._writes_critiques:
            raise UserError(f"reward model {self._model} writes no critiques, so it cannot align one")
        return await self._judge_cached(prompt, response_text, critique)

    async def _judge_cached(self, prompt: Prompt, response_text: str, critique: str | None) -> SpanFeedback:
        key = (prompt.prompt_text, response_text, critique)
        if key in self._cache:
            return self._cache[key]
        feedback = await self._request(prompt, response_text, critique=critique)
        if feedback.status != "failed":
            self._cache[key] = feedback
        if len(self._cache) > MAX_CACHED_ANSWERS:
            oldest = next(iter(self._cache))
            del self._cache[oldest]
        return feedback

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Judge without guided decoding and without the cache, for the parse rate."""
        return await self._request(prompt, response_text, guided=False)

    async def _request(self, prompt: Prompt, response_text: str, **options: Any) -> SpanFeedback:
        try:
            return await self.call(
                lambda worker: worker.judge.remote(prompt, response_text, **options),
                timeout_s=self._timeout_s,
                what=f"the feedback on prompt {prompt.prompt_id}",
            )
        except (SamplingFailed, UserError) as error:
            logger.warning("no feedback: %s", error)
            return make_failed_feedback("failed", source=SOURCE, version=self.version, reason=str(error))

    def clear_cache(self) -> None:
        """Drop all cached answers: a timed run must not use those of an earlier run."""
        self._cache.clear()
