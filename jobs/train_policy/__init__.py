"""Train a policy: the command is `__main__`, runs of PPO and of the baselines are in `policy_runs`."""
