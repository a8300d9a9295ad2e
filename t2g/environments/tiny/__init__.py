"""Environments of the tiny worlds. Imports as in `t2g.environments`, and `t2g.tasks.tiny`."""
