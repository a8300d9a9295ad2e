"""What a run folder holds: config, checkpoints, metrics, samples, journal, control and progress. Records in, files out.

May import `t2g.feedback` and below. loop, study, report, deploy, actors and jobs may import it.
"""
