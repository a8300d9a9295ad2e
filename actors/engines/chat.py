"""An instruct model as an annotator on local engines: the same requests as to an endpoint, without a server.

`ChatWorker` is the remote side, `ChatFleet` the driver's, which implements `t2g.feedback.sources.chat_client.Chat`.
"""

import numpy as np
import ray

from actors.engines.engine import Engine
from actors.fleet.fleet import REQUEST_TRIES, Fleet
from t2g.config import SourceConfig
from t2g.errors import SamplingFailed, UserError
from t2g.feedback.sources.chat_client import ChatCompletion, ChatError, ChatRequest
from t2g.runs.contents import format_model_label
from t2g.text.tokenizer import check_chat_template, encode_chat


class ChatWorker(Engine):
    """One engine that answers chats. `start` raises UserError for a tokenizer without a chat template."""

    def __init__(self, config: SourceConfig, seed: int) -> None:
        assert config.llm.model is not None
        super().__init__(config.llm.model, config.engine, seed=seed, revision=config.llm.revision, guided=True)

    def check_tokenizer(self) -> None:
        check_chat_template(self._tokenizer)

    async def complete(self, question: ChatRequest) -> ChatCompletion:
        """Answer one chat. Raises UserError if the chat template refuses it, or the window is too small."""
        ids = np.asarray(encode_chat(self._tokenizer, question.messages), np.int32)
        if len(ids) + question.max_output_tokens > self._config.max_model_len:
            raise UserError(
                f"a question of {len(ids)} tokens and an answer of llm.max_output_tokens={question.max_output_tokens} "
                f"do not fit into engine.max_model_len={self._config.max_model_len}; raise it, or lower the other"
            )
        done = await self.generate(
            ids,
            temperature=question.temperature,
            max_new_tokens=question.max_output_tokens,
            seed=question.seed if question.temperature > 0 else None,
            guide={"json": dict(question.schema)} if question.schema else None,
        )
        return ChatCompletion(
            text=done.text,
            finish_reason=done.finish_reason,
            prompt_tokens=len(ids),
            output_tokens=len(done.ids),
        )


ChatActor = ray.remote(ChatWorker)


class ChatFleet(Fleet):
    """Chat workers as one model."""

    role = "chat"
    actor = ChatActor

    def __init__(self, config: SourceConfig, *, seed: int, placement_timeout_s: float) -> None:
        assert config.llm.model is not None
        if config.llm.max_output_tokens >= config.engine.max_model_len:
            raise UserError(
                f"llm.max_output_tokens={config.llm.max_output_tokens} leaves no room for a question in "
                f"engine.max_model_len={config.engine.max_model_len}; it needs to be smaller"
            )
        self.model = format_model_label(config.llm.model, config.llm.revision)
        self.name = f"{config.llm.model} on own engines"
        attempt_s = config.timeout_s / REQUEST_TRIES  # the caller waits for timeout_s
        self._timeout_s = min(config.llm.request_timeout_s, attempt_s)
        arguments = {"config": config, "seed": seed}
        super().__init__(arguments, config.engine, placement_timeout_s=placement_timeout_s)

    async def complete(self, question: ChatRequest) -> ChatCompletion:
        """Answer one chat. Raises ChatError if it does not fit or no worker answers, RunStopped if none is left."""
        try:
            return await self.call(
                lambda worker: worker.complete.remote(question), timeout_s=self._timeout_s, what="a chat"
            )
        except UserError as error:
            raise ChatError("refused", str(error)) from None
        except SamplingFailed as error:
            raise ChatError("timeout", str(error), is_transient=True) from None
