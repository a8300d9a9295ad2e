"""What a dry run shows of the data: the first prompt as the model reads it, and the thinking tags of the model."""

from collections.abc import Sequence
from typing import Any

from jobs.train_policy.policy_data import PolicyData
from t2g.config import AnyJob, PolicyJob, SFTJob
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.text.segments import printable
from t2g.text.thinking import find_last_tag, find_thinking_tags

MAX_CHARS = 1500  # shown of a prompt, half of them from its end


def preview_data(config: AnyJob, data: Any) -> str:
    """Return the lines for the data that a job has read; "" for a job without prompts of its own policy."""
    if isinstance(config, PolicyJob) and isinstance(data, PolicyData):
        prompt = data.prompts[0]
        return _preview(config, data.tokenizer, prompt.prompt_ids, f"prompt {prompt.prompt_id}")
    if type(config) is SFTJob and data:
        example = data[0]
        tokenizer = load_policy_tokenizer(config.model)
        return _preview(config, tokenizer, example.prompt_ids, "the first example")
    return ""


def _preview(config: PolicyJob | SFTJob, tokenizer: Any, ids: Sequence[int], label: str) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if len(text) > MAX_CHARS:
        left_out = len(text) - MAX_CHARS
        half = MAX_CHARS // 2
        text = f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
    lines = "\n".join(f"  | {line}" for line in printable(text).split("\n"))
    tags = find_thinking_tags(tokenizer, config.model.thinking_tags)
    tags_line = "none found"
    if tags is not None:
        tags_line = f"{tags[0]} and {tags[1]}"
        if last := find_last_tag(tokenizer, ids, tags):
            tags_line += f"; the prompt ends with {last}"
    return f"{label}, as the model reads it ({len(ids):,} tokens):\n{lines}\nthinking tags: {tags_line}"
