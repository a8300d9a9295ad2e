"""The training loop: prompts, engines and feedback in; updates, metrics and checkpoints out.

`trainer` runs the steps, `producer` samples ahead of it, and `steps`, `step_metrics`, `resampling`, `teacher` and
`sampling` hold their pure functions. `annotation` is the loop of an annotation. All is written against
`t2g.interfaces`, so it does not know where it runs. Only actors, jobs and `t2g.study` may import this package.
"""
