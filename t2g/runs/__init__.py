"""Files of a run folder: identity, checkpoints, metrics, samples, journal, control and progress.

May import `t2g.feedback` and below. loop, study, report, deploy, actors and jobs may import it.
"""
