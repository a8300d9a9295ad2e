"""The span reward model as a server: guided decoding in vLLM, its own tokenizer, its own workers.

Guided by a grammar of exactly the JSON that it is trained to write (`t2g.feedback.grammar.answer_grammar`).
`RewardWorker` is the remote side, `RewardFleet` the driver's, which implements `t2g.interfaces.FeedbackSource`.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.engines.engine import Engine, stop_token_ids
from actors.fleet.fleet import TRIES, Fleet
from t2g.config import FeedbackConfig
from t2g.errors import SamplingFailed, UserError
from t2g.feedback.card import check_card, make_card
from t2g.feedback.examples import target_ids
from t2g.feedback.grammar import answer_grammar
from t2g.feedback.parse import begun_answer, no_feedback, parse_answer
from t2g.feedback.reward_prompt import build_feedback_prompt
from t2g.files import weights_version
from t2g.tasks.base import Task
from t2g.text.offsets import decode
from t2g.text.tokenizer import load_tokenizer
from t2g.types import Prompt, SpanFeedback

logger = logging.getLogger(__name__)

SOURCE = "reward_model"
MAX_ANSWERS = 4096  # that are kept
Judged = tuple[str, str, str | None]  # text of the prompt, response, critique where one was given
Ask = Callable[[Any], Any]  # from a worker's handle to the reference of its answer
BLANK = Prompt(prompt_id="(none)", prompt_ids=np.zeros(0, np.int32), prompt_text="", task="")


class RewardWorker:
    """One reward engine. `start` first."""

    def __init__(self, config: FeedbackConfig, task: Task, seed: int, version: str) -> None:
        assert config.reward_model is not None
        self._model, self._revision = config.reward_model, config.reward_revision
        self._config, self._style, self._task, self._version = config.engine, config.style, task, version
        self._engine = Engine(self._model, config.engine, seed=seed, revision=self._revision, guided=True)
        self._guide = self._grammar()

    async def start(self) -> None:
        """Load everything. UserError when the instructions alone do not fit, or there is no chat template."""
        self._tokenizer = load_tokenizer(self._model, self._revision)
        self._stop_ids = stop_token_ids(self._model, self._tokenizer, self._revision)
        self._prompt_ids(BLANK, "", self._config.max_prompt_tokens)
        await self._engine.start()

    async def probe(self) -> None:
        await self._engine.probe()

    async def judge(self, prompt: Prompt, response_text: str, *, guided: bool = True) -> SpanFeedback:
        """Greedy, so that the same response gets the same critique. A cut answer is unparsable.

        Raises UserError when the response does not fit beside the instructions.
        """
        ids = self._prompt_ids(prompt, response_text, self._config.max_prompt_tokens)
        return await self._answer(ids, response_text, guide=self._guide if guided else None)

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """`judge` with the critique given: the answer begins with it, and the model goes on with the span map.

        Raises UserError when critique and response do not fit beside the instructions.
        """
        begun = begun_answer(critique)
        begun_ids, text = begin_answer(begun, self._tokenizer)
        ids = self._prompt_ids(prompt, response_text, self._config.max_prompt_tokens - len(begun_ids))
        guide = self._grammar(begun[len(text) :])
        return await self._answer(np.concatenate([ids, begun_ids]), response_text, begun=text, guide=guide)

    def _prompt_ids(self, prompt: Prompt, response_text: str, room: int) -> np.ndarray:
        ids = build_feedback_prompt(self._task, prompt, response_text, self._tokenizer, room, style=self._style)
        return np.asarray(ids, np.int32)

    def _grammar(self, rest_of_critique: str | None = None) -> str:
        return answer_grammar(
            max_critique_chars=self._config.max_critique_chars,
            max_spans=self._config.max_spans,
            max_quote_chars=self._config.max_quote_chars,
            style=self._style,
            rest_of_critique=rest_of_critique,
        )

    async def _answer(self, ids: np.ndarray, response_text: str, *, guide: str | None, begun: str = "") -> SpanFeedback:
        """The feedback in `begun` and what the model goes on with after the tokens `ids` [P]."""
        done = await self._engine.generate(
            ids,
            temperature=0.0,
            max_new_tokens=self._config.max_new_tokens,
            seed=None,
            stop_ids=self._stop_ids,
            grammar=guide,
        )
        return parse_answer(
            begun + decode(self._tokenizer, done.ids),
            response_text,
            source=SOURCE,
            version=self._version,
            finish_reason=done.finish_reason,
            style=self._style,
        )


def begin_answer(begun: str, tokenizer: Any) -> tuple[np.ndarray, str]:
    """Tokens of the beginning of an answer as training spells it, [P] int32, and the text that they make.

    The last token is left to the model: in training it may have held characters of what follows as well, a full stop
    and the quotation mark behind it. Nor is a character cut in two.
    """
    ids = target_ids(begun, tokenizer)[:-2]
    while not begun.startswith(text := decode(tokenizer, ids)):
        ids = ids[:-1]
    return ids, text


class RewardFleet:
    """Reward workers as one feedback source. Answers are kept for whoever asks again."""

    name = SOURCE

    def __init__(
        self, config: FeedbackConfig, task: Task, *, seed: int, placement_timeout_s: float, actor: Any = None
    ) -> None:
        """UserError when the model was trained for another task or style; see `t2g.feedback.card`.

        actor: another class with a RewardWorker's methods.
        """
        assert config.reward_model is not None
        self._config = config
        card = make_card(task, config.style)
        check_card(Path(config.reward_model), card)
        weights = weights_version(config.reward_model, config.reward_revision)
        self.version = f"{config.reward_model}@{weights}/{card.prompt_version}"
        arguments = (config, task, seed, self.version)
        self.fleet = Fleet(
            "reward", actor or RewardActor, arguments, config.engine, placement_timeout_s=placement_timeout_s
        )
        self._answers: dict[Judged, SpanFeedback] = {}

    def wait_ready(self) -> None:
        self.fleet.wait_ready()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Failed feedback when no worker answers in time, and for a response too long for the reward model's window.
        Raises RunStopped when no worker is left.
        """
        return await self._kept(prompt, response_text, None, lambda worker: worker.judge.remote(prompt, response_text))

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        """The spans of a critique that somebody else wrote; else as `judge`. UserError for a model that writes none."""
        if not self._config.style.critique:
            raise UserError(f"reward model {self._config.reward_model} writes no critiques, so it cannot align one")
        return await self._kept(
            prompt, response_text, critique, lambda worker: worker.align.remote(prompt, response_text, critique)
        )

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """`judge` without guided decoding, for the parse rate; nothing is kept."""
        return await self._call(prompt, lambda worker: worker.judge.remote(prompt, response_text, guided=False))

    async def _kept(self, prompt: Prompt, response_text: str, critique: str | None, ask: Ask) -> SpanFeedback:
        """By what is judged: ids are no key, held-out prompts may have those of others."""
        judged = (prompt.prompt_text, response_text, critique)
        if judged not in self._answers:
            feedback = await self._call(prompt, ask)
            if feedback.status == "failed":
                return feedback
            self._answers[judged] = feedback
            if len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]  # the oldest
            return feedback
        return self._answers[judged]

    async def _call(self, prompt: Prompt, ask: Ask) -> SpanFeedback:
        timeout_s = min(self._config.engine.request_timeout_s, self._config.timeout_s / TRIES)
        what = f"the feedback on prompt {prompt.prompt_id}"
        try:
            return await self.fleet.call(ask, load=1, timeout_s=timeout_s, what=what)
        except (SamplingFailed, UserError) as error:
            logger.warning("no feedback: %s", error)
            return no_feedback("failed", source=SOURCE, version=self.version, reason=str(error))

    def forget(self) -> None:
        """Every answer that was kept: a run that is timed must not profit from one before it."""
        self._answers.clear()

    def close(self) -> None:
        self.fleet.close()


RewardActor = ray.remote(RewardWorker)
