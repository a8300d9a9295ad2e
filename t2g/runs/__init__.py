"""What a run folder holds: identity, checkpoints, metrics, samples, journal, control, progress. Records in, files out.

May import `t2g.feedback` and below. loop, study, report, deploy, actors and jobs may import it.
"""
