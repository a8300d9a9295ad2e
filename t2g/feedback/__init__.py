"""Text to numbers: prompts for critiques, parsing answers, locating quotes, projecting spans onto sampled tokens.

May import t2g's records, config, errors and t2g.data.tokenizer; openai and transformers inside functions only.
"""

from t2g.feedback.offsets import decode, token_offsets
from t2g.feedback.rewards import token_rewards
from t2g.feedback.spans import locate

__all__ = ["decode", "locate", "token_offsets", "token_rewards"]
