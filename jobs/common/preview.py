"""What a dry run shows of the data: the first prompt as the model reads it, and the thinking tags of the model."""

from typing import Any

from t2g.config import AnyJob
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.text.segments import printable
from t2g.text.thinking import find_last_tag, find_thinking_tags

MAX_CHARS = 1500  # shown of a prompt, half of them from its end


def preview_data(config: AnyJob, data: Any) -> str:
    """Return the lines for the data that a job has read; "" for a job without prompts of its own policy."""
    prompt = config.first_prompt(data)
    if prompt is None:
        return ""
    tokenizer = load_policy_tokenizer(prompt.model)
    text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if len(text) > MAX_CHARS:
        left_out = len(text) - MAX_CHARS
        half = MAX_CHARS // 2
        text = f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
    lines = "\n".join(f"  | {line}" for line in printable(text).split("\n"))
    tags = find_thinking_tags(tokenizer, prompt.model.thinking_tags)
    tags_line = "none found"
    if tags is not None:
        tags_line = f"{tags[0]} and {tags[1]}"
        if last := find_last_tag(tokenizer, prompt.token_ids, tags):
            tags_line += f"; the prompt ends with {last}"
    num_tokens = len(prompt.token_ids)
    return f"{prompt.label}, as the model reads it ({num_tokens:,} tokens):\n{lines}\nthinking tags: {tags_line}"
