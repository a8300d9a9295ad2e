"""What the programs share: the command line, the folder of a run, one run of each training and of annotation, fleets
that are started once, the stages of the demo, the runs of a comparison, a reward model that is served.

Only jobs import it, and it imports no program. `cli`, `run_folder` and `annotation_runs` are light; a program imports
the others when it runs, not before.
"""
