"""Make what other jobs start from, of a demo config: a world, a base policy, records, a reward model."""
