"""Tasks: prompts of the policy, instructions of the reward model, and measures that are independent of feedback.

May import t2g's records, config and errors, `t2g.text` and the sandbox; data and all above may import it.
"""
