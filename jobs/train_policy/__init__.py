"""Train a policy: `policy_job` is the job, `policy_training` a run of PPO, `baseline_runs` one of a baseline."""
