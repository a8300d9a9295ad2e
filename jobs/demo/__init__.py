"""Run the whole pipeline on a tiny world: the command is `__main__`, its runs of PPO are in `demo_methods`."""
