"""Environments, which reply to the policy's turns: one prompt, several turns, one rollout.

May import feedback and below; loop, study, actors and jobs may import it. An environment of a user is untrusted, as a
feedback function is.
"""

from t2g.environments.environment import Reply

__all__ = ["Reply"]
