"""Load files as records, prompts and batches; store the buffer of judged samples in a checkpoint.

May import `t2g.tasks` and `t2g.text`; transformers and datasets inside functions only. feedback and all packages above
may import it.
"""
