"""The span reward model as a server: guided decoding in vLLM, its own tokenizer, its own workers.

Guided by a grammar of exactly the JSON that it is trained to write (`t2g.feedback.grammar.make_answer_grammar`).
`RewardWorker` is the remote side, `RewardFleet` the driver's, which implements `t2g.interfaces.FeedbackSource`.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.engines.engine import Engine
from actors.fleet.fleet import TRIES, Fleet
from t2g.config import FeedbackConfig, RewardEngineConfig
from t2g.errors import SamplingFailed, UserError
from t2g.feedback.card import check_card, make_card
from t2g.feedback.examples import encode_target
from t2g.feedback.grammar import make_answer_grammar
from t2g.feedback.parse import format_answer_prefix, make_failed_feedback, parse_answer
from t2g.feedback.reward_prompt import build_feedback_prompt
from t2g.runs.contents import content_hash
from t2g.tasks.base import Task
from t2g.text.offsets import decode
from t2g.types import Prompt, SpanFeedback

logger = logging.getLogger(__name__)

SOURCE = "reward_model"
MAX_ANSWERS = 4096  # that are kept
BLANK = Prompt(prompt_id="(none)", prompt_text="", task="")


class RewardWorker(Engine):
    """One reward engine. `start` first; it raises UserError when the instructions alone do not fit, or there is no chat
    template."""

    _config: RewardEngineConfig

    def __init__(self, config: FeedbackConfig, task: Task, seed: int, version: str) -> None:
        assert config.reward_model is not None
        super().__init__(config.reward_model, config.engine, seed=seed, revision=config.reward_revision, guided=True)
        self._style, self._task, self._version = config.style, task, version
        self._guide = self._grammar()

    def check_tokenizer(self) -> None:
        self._prompt_ids(BLANK, "", self._config.max_prompt_tokens)

    async def judge(
        self, prompt: Prompt, response_text: str, *, critique: str | None = None, guided: bool = True
    ) -> SpanFeedback:
        """Greedy, so that the same response gets the same critique. A cut answer is unparsable.

        critique: given by somebody else; the answer begins with it, and the model goes on with the span map. Raises
        UserError when response and critique do not fit beside the instructions.
        """
        begun_ids, begun, grammar = np.zeros(0, np.int32), "", self._guide
        if critique is not None:
            whole = format_answer_prefix(critique)
            begun_ids, begun = begin_answer(whole, self._tokenizer)
            grammar = self._grammar(whole[len(begun) :])
        ids = self._prompt_ids(prompt, response_text, self._config.max_prompt_tokens - len(begun_ids))
        done = await self.generate(
            np.concatenate([ids, begun_ids]),
            temperature=0.0,
            max_new_tokens=self._config.max_new_tokens,
            seed=None,
            guide={"grammar": grammar} if guided else None,
        )
        return parse_answer(
            begun + done.text,
            response_text,
            source=SOURCE,
            version=self._version,
            finish_reason=done.finish_reason,
            style=self._style,
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


def begin_answer(begun: str, tokenizer: Any) -> tuple[np.ndarray, str]:
    """Tokens of the beginning of an answer as training spells it, [P] int32, and the text that they make.

    The last token is left to the model: in training it may have held characters of what follows as well, a full stop
    and the quotation mark behind it. Nor is a character cut in two.
    """
    ids = encode_target(begun, tokenizer)[:-2]
    while not begun.startswith(text := decode(tokenizer, ids)):
        ids = ids[:-1]
    return ids, text


RewardActor = ray.remote(RewardWorker)


class RewardFleet(Fleet):
    """Reward workers as one feedback source and aligner. Answers are cached for equal requests."""

    name, role, actor = SOURCE, "reward", RewardActor

    def __init__(self, config: FeedbackConfig, task: Task, *, seed: int, placement_timeout_s: float) -> None:
        """UserError when the model was trained for another task or style; see `t2g.feedback.card`."""
        assert config.reward_model is not None
        card = make_card(task, config.style)
        check_card(Path(config.reward_model), card)
        weights = content_hash(Path(config.reward_model)) or config.reward_revision or "unpinned"
        self.version = f"{config.reward_model}@{weights}/{card.prompt_version}"
        self._model, self._writes_critiques = config.reward_model, config.style.critique
        engine = config.engine
        self._timeout_s = min(engine.deadline_s, engine.timeout_scale * config.timeout_s / TRIES)
        # By what is judged, prompt, response and a critique that was given: ids are no key, held-out prompts may have
        # those of others.
        self._judged: dict[tuple[str, str, str | None], SpanFeedback] = {}
        arguments = {"config": config, "task": task, "seed": seed, "version": self.version}
        super().__init__(arguments, config.engine, placement_timeout_s=placement_timeout_s)

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Failed feedback when no worker answers in time, and for a response too long for the reward model's window.
        Raises RunStopped when no worker is left.
        """
        return await self._kept(prompt, response_text, None)

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """The spans of a critique that somebody else wrote; else as `judge`. UserError for a model that writes none."""
        if not self._writes_critiques:
            raise UserError(f"reward model {self._model} writes no critiques, so it cannot align one")
        return await self._kept(prompt, response_text, critique)

    async def _kept(self, prompt: Prompt, response_text: str, critique: str | None) -> SpanFeedback:
        key = (prompt.prompt_text, response_text, critique)
        if key in self._judged:
            return self._judged[key]
        feedback = await self._ask(prompt, response_text, critique=critique)
        if feedback.status != "failed":
            self._judged[key] = feedback
        if len(self._judged) > MAX_ANSWERS:
            del self._judged[next(iter(self._judged))]  # the oldest
        return feedback

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """`judge` without guided decoding, for the parse rate; nothing is kept."""
        return await self._ask(prompt, response_text, guided=False)

    async def _ask(self, prompt: Prompt, response_text: str, **how: Any) -> SpanFeedback:
        try:
            return await self.call(
                lambda worker: worker.judge.remote(prompt, response_text, **how),
                timeout_s=self._timeout_s,
                what=f"the feedback on prompt {prompt.prompt_id}",
            )
        except (SamplingFailed, UserError) as error:
            logger.warning("no feedback: %s", error)
            return make_failed_feedback("failed", source=SOURCE, version=self.version, reason=str(error))

    def forget(self) -> None:
        """Every answer that was kept: a run that is timed must not profit from one before it."""
        self._judged.clear()
