"""Data sets, chat templates, supervised examples, batching and packing, the sample buffer in a checkpoint.

May import t2g's records, config and errors, t2g.feedback and t2g.tasks; inside functions transformers and datasets.
"""
