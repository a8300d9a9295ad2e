"""Measure policies or a reward model: the command is `__main__`, policies are in `policy_evaluation`."""
