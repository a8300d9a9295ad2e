"""Files to records, prompts, supervised examples and batches; the buffer of judged samples in a checkpoint.

May import `t2g.tasks` and `t2g.text`; transformers and datasets inside functions. feedback and all above may import it.
"""
