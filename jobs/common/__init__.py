"""What the programs share: the command line, fleets that are started once, the stages of the demo, steering a run.

Only jobs import it; anything heavy inside functions.
"""
