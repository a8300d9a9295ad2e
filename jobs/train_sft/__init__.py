"""Fine-tune a policy on references: the command is `__main__`, the training is in `supervised`."""
