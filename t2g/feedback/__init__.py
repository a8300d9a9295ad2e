"""Text to numbers: reward model prompts, parsed answers, located quotes, and spans projected onto sampled tokens.

May import data, tasks and text; openai and transformers inside functions only. runs and all above may import it.
"""

from t2g.feedback.rewards import token_rewards
from t2g.text.offsets import decode, token_offsets
from t2g.text.quotes import locate

__all__ = ["decode", "locate", "token_offsets", "token_rewards"]
