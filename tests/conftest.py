"""Hypothesis examples have no deadline: on a machine whose cores are taken, any of them may take a second."""

from hypothesis import settings

settings.register_profile("t2g", deadline=None)
settings.load_profile("t2g")
