"""Numbers to loss: logprobs, KL, advantages, losses, corrections. Pure functions of torch tensors.

Shape letters: B responses, R response tokens (right-padded), N response tokens of a microbatch, V vocabulary.
"""

from t2g.algo.advantages import gae

__all__ = ["gae"]
