"""Tasks: what the policy is asked, what the reward model is told to judge, and a measure of its own where there is one.

May import t2g's records, config and errors, t2g.text.tokenizer, and of t2g.feedback what reads quotes (parse, spans):
a task gives words, not numbers.
"""
