"""Train the span reward model: the command is `__main__`, training and measurement are in `reward_models`."""
