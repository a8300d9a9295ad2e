"""What a dry run shows of the data: a rendered prompt and the thinking tags."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thinking import R1_LIKE, build_thinking_tokenizer

from jobs.common import preview
from jobs.common.preview import MAX_CHARS, preview_data
from jobs.train_policy.policy_data import PolicyData
from t2g.config import AnnotateJob, PolicyJob, SFTJob
from t2g.tasks.base import get_task
from t2g.text.tokenizer import encode_chat
from t2g.types import Prompt, TrainSequence

SECTIONS = {"model": {"policy": "p"}, "data": {"path": "d"}}


def read_preview(tokenizer: Any, text: str, **model: Any) -> list[str]:
    config = PolicyJob.model_validate(
        SECTIONS | {"model": {"policy": "p", **model}, "feedback": {"source": "pkg:judge"}}
    )
    ids = np.array(encode_chat(tokenizer, [{"role": "user", "content": text}]))
    prompt = Prompt(prompt_id="q7", prompt_text=text, task="prompts", prompt_ids=ids)
    data = PolicyData(task=get_task("prompts"), tokenizer=tokenizer, prompts=[prompt], eval_prompts=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preview, "load_policy_tokenizer", lambda model: tokenizer)
        return preview_data(config, data).splitlines()


def test_a_dry_run_shows_the_rendered_prompt_and_the_tags(tmp_path: Path) -> None:
    tokenizer = build_thinking_tokenizer(tmp_path)
    lines = read_preview(tokenizer, "why\x1b?")
    assert lines[0].startswith("prompt q7, as the model reads it (") and lines[0].endswith(" tokens):")
    assert lines[1:4] == ["  | <|im_start|>user", "  | why\u241b?<|im_end|>", "  | <|im_start|>assistant"]
    assert lines[-1] == "thinking tags: <think> and </think>"
    assert read_preview(tokenizer, "why?", thinking_tags=[])[-1] == "thinking tags: none found"
    tokenizer.chat_template = R1_LIKE
    assert read_preview(tokenizer, "why?")[-1] == "thinking tags: <think> and </think>; the prompt ends with <think>"


def test_a_long_prompt_shows_its_beginning_and_its_end(tmp_path: Path) -> None:
    tokenizer = build_thinking_tokenizer(tmp_path)
    text = "\n".join(read_preview(tokenizer, "so good " * 1000))
    assert len(text) < MAX_CHARS + 200 and "characters ...]" in text
    assert "<|im_start|>user" in text and "<|im_start|>assistant" in text


def test_the_first_example_of_a_supervised_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_thinking_tokenizer(tmp_path)
    monkeypatch.setattr(preview, "load_policy_tokenizer", lambda model: tokenizer)
    ids = np.array(encode_chat(tokenizer, [{"role": "user", "content": "why?"}]))
    example = TrainSequence(prompt_ids=ids, response_ids=ids[:2], weights=np.ones(2, np.float32))
    lines = preview_data(SFTJob.model_validate(SECTIONS), [example]).splitlines()
    assert lines[1:3] == ["  | <|im_start|>user", "  | why?<|im_end|>"]
    annotate = AnnotateJob.model_validate({"data": {"path": "d"}, "annotate": {"source": "pkg:judge"}})
    assert preview_data(annotate, [example]) == ""
