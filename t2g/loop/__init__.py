"""The loop of a run: prompts, engines and feedback in; updates, metrics and checkpoints out.

`trainer` turns the steps, `producer` samples ahead of it, `steps` and `sampling` are their pure pieces; `annotation` is
the loop of stage 1. Written against `t2g.interfaces`, so it does not know where it runs. Only actors, jobs and
`t2g.study` may import it.
"""
