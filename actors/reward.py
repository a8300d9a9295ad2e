"""The span reward model as a server: guided decoding in vLLM, its own tokenizer, its own workers.

Guided by a grammar of exactly the JSON that it is trained to write (`t2g.feedback.parse.answer_grammar`).
`RewardWorker` is the remote side, `RewardFleet` the driver's, which implements `t2g.interfaces.FeedbackSource`.
"""

import logging
from collections import OrderedDict

import numpy as np
import ray

from actors.engine import Engine, stop_token_ids
from actors.fleet import Fleet
from t2g.config import FeedbackConfig, RewardEngineConfig
from t2g.data.chat import load_tokenizer
from t2g.errors import UserError
from t2g.feedback.offsets import decode
from t2g.feedback.parse import answer_grammar, no_feedback, parse_answer
from t2g.feedback.prompts import build_feedback_prompt, prompt_version
from t2g.tasks.base import Task
from t2g.types import Prompt, SpanFeedback

logger = logging.getLogger(__name__)

SOURCE = "reward_model"
MAX_ANSWERS = 4096  # that are kept
BLANK = Prompt(prompt_id="(none)", prompt_ids=np.zeros(0, np.int32), prompt_text="", task="")


class RewardWorker:
    """One reward engine. `start` first."""

    def __init__(
        self, model: str, config: RewardEngineConfig, task: Task, seed: int, revision: str | None, version: str
    ) -> None:
        self._model, self._config, self._task = model, config, task
        self._revision, self._version = revision, version
        self._engine = Engine(model, config, seed=seed, revision=revision, guided=True)
        self._grammar = answer_grammar(
            max_critique_chars=config.max_critique_chars,
            max_spans=config.max_spans,
            max_quote_chars=config.max_quote_chars,
        )

    async def start(self) -> None:
        """Load everything. UserError when the instructions alone do not fit, or there is no chat template."""
        self._tokenizer = load_tokenizer(self._model, self._revision)
        self._stop_ids = stop_token_ids(self._model, self._tokenizer, self._revision)
        self._prompt_ids(BLANK, "")
        await self._engine.start()

    async def ping(self) -> None:
        await self._engine.ping()

    def _prompt_ids(self, prompt: Prompt, response_text: str) -> np.ndarray:
        room = self._config.max_model_len - self._config.max_new_tokens
        return np.asarray(build_feedback_prompt(self._task, prompt, response_text, self._tokenizer, room), np.int32)

    async def judge(self, prompt: Prompt, response_text: str, *, guided: bool = True) -> SpanFeedback:
        """Greedy, so that the same response gets the same critique. A cut answer is unparsable.

        Raises UserError when the response does not fit beside the instructions.
        """
        done = await self._engine.generate(
            self._prompt_ids(prompt, response_text),
            temperature=0.0,
            max_new_tokens=self._config.max_new_tokens,
            seed=None,
            stop_ids=self._stop_ids,
            grammar=self._grammar if guided else None,
        )
        return parse_answer(
            decode(self._tokenizer, done.ids),
            response_text,
            source=SOURCE,
            version=self._version,
            finish_reason=done.finish_reason,
        )


class Answers:
    """The last `size` judgements by what was judged. Ids are no key: held-out prompts may have those of others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_text: OrderedDict[tuple[str, str], SpanFeedback] = OrderedDict()

    def get(self, prompt: Prompt, response_text: str) -> SpanFeedback | None:
        key = (prompt.prompt_text, response_text)
        if key in self._by_text:
            self._by_text.move_to_end(key)
        return self._by_text.get(key)

    def keep(self, prompt: Prompt, response_text: str, feedback: SpanFeedback) -> None:
        self._by_text[prompt.prompt_text, response_text] = feedback
        if len(self._by_text) > self._size:
            self._by_text.popitem(last=False)


class RewardFleet:
    """Reward workers as one feedback source. Answers are kept: the same response is judged once."""

    name = SOURCE

    def __init__(self, config: FeedbackConfig, task: Task, *, seed: int, placement_timeout_s: float) -> None:
        assert config.reward_model is not None
        self._config = config
        self.version = f"{config.reward_model}@{config.reward_revision or 'local'}/{prompt_version(task)}"
        arguments = (config.reward_model, config.engine, task, seed, config.reward_revision, self.version)
        self._fleet = Fleet("reward", RewardActor, arguments, config.engine, placement_timeout_s=placement_timeout_s)
        self._answers = Answers(MAX_ANSWERS)

    def wait_ready(self) -> None:
        self._fleet.wait_ready()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Failed feedback after two late workers in a row, and for a response too long for the reward model's window.
        Raises RunStopped when no worker is left.
        """
        feedback = self._answers.get(prompt, response_text)
        if feedback is None:
            feedback = await self._ask(prompt, response_text)
            if feedback.status != "failed":
                self._answers.keep(prompt, response_text, feedback)
        return feedback

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """`judge` without guided decoding, for the parse rate; nothing is kept."""
        return await self._ask(prompt, response_text, guided=False)

    async def _ask(self, prompt: Prompt, response_text: str, *, guided: bool = True) -> SpanFeedback:
        timeout_s = min(self._config.engine.request_timeout_s, self._config.timeout_s / 2)  # `call` tries twice
        try:
            return await self._fleet.call(
                lambda worker: worker.judge.remote(prompt, response_text, guided=guided),
                load=1,
                timeout_s=timeout_s,
                what=f"the feedback on prompt {prompt.prompt_id}",
            )
        except (TimeoutError, UserError) as error:
            logger.warning("no feedback: %s", error)
            return no_feedback("failed", source=SOURCE, version=self.version)

    def close(self) -> None:
        self._fleet.close()


RewardActor = ray.remote(RewardWorker)
