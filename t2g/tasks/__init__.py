"""Tasks: what the policy is asked, what the reward model is told to judge, and a measure of its own where there is one.

May import t2g's records, config and errors and t2g.data.chat. Never t2g.feedback: a task gives words, not numbers.
"""
