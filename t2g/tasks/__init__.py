"""Tasks: what the policy is asked, what the reward model is told to judge, and a measure of its own where there is one.

May import t2g's records, config and errors, `t2g.text` and the sandbox; data and all above may import it. A task gives
words, not numbers.
"""
