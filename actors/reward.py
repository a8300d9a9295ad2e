"""The span reward model as a server: guided JSON decoding in vLLM, its own tokenizer, its own workers.

`RewardWorker` is the remote side, `RewardFleet` the driver's, which implements `t2g.interfaces.FeedbackSource`.
"""

import ray

from actors.engine import Engine, stop_token_ids
from actors.fleet import Fleet
from t2g.config import FeedbackConfig, RewardEngineConfig
from t2g.feedback.offsets import decode
from t2g.feedback.parse import answer_grammar, no_feedback, parse_answer
from t2g.feedback.prompts import build_feedback_prompt, prompt_version
from t2g.tasks.base import Task
from t2g.types import Prompt, SpanFeedback

SOURCE = "reward_model"


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
        await self._engine.start()
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self._model, revision=self._revision)
        self._stop_ids = stop_token_ids(self._model, self._tokenizer, self._revision)

    async def judge(self, prompt: Prompt, response_text: str, *, guided: bool = True) -> SpanFeedback:
        """Greedy, so that the same response gets the same critique. A cut answer is unparsable."""
        room = self._config.max_model_len - self._config.max_new_tokens
        done = await self._engine.generate(
            build_feedback_prompt(self._task, prompt, response_text, self._tokenizer, room),
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


class RewardFleet:
    """Reward workers as one feedback source. Answers are kept: the same response is judged once."""

    name = SOURCE

    def __init__(self, config: FeedbackConfig, task: Task, *, seed: int, placement_timeout_s: float) -> None:
        assert config.reward_model is not None
        self._config = config
        self.version = f"{config.reward_model}@{config.reward_revision or 'local'}/{prompt_version(task)}"
        arguments = (config.reward_model, config.engine, task, seed, config.reward_revision, self.version)
        self._fleet = Fleet("reward", RewardActor, arguments, config.engine, placement_timeout_s=placement_timeout_s)
        self._answers: dict[tuple[str, str], SpanFeedback] = {}

    def wait_ready(self) -> None:
        self._fleet.wait_ready()

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Two late workers in a row make a failed feedback. Raises RunStopped when no worker is left, and UserError
        when the instructions do not fit into the reward model's window."""
        key = (prompt.prompt_id, response_text)
        if key not in self._answers:
            feedback = await self._ask(prompt, response_text)
            if feedback.status == "failed":
                return feedback
            self._answers[key] = feedback
        return self._answers[key]

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """`judge` without guided decoding, for the parse rate; nothing is kept."""
        return await self._ask(prompt, response_text, guided=False)

    async def _ask(self, prompt: Prompt, response_text: str, *, guided: bool = True) -> SpanFeedback:
        try:
            return await self._fleet.call(
                lambda worker: worker.judge.remote(prompt, response_text, guided=guided),
                load=1,
                timeout_s=self._config.timeout_s / 2,
                what=f"the feedback on prompt {prompt.prompt_id}",
            )
        except TimeoutError:
            return no_feedback("failed", source=SOURCE, version=self.version)

    def close(self) -> None:
        self._fleet.close()


RewardActor = ray.remote(RewardWorker)
