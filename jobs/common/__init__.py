"""What the programs share: the command line, the folder of a run, fleets that are started once, journals.

Only jobs import it, and it imports no program. `cli` and `run_folder` are light; a program imports the others when it
runs, not before.
"""
