"""Studies: methods side by side, and how good a reward model is: method files in, configs of runs out; what the runs
wrote in, figures out.

Pure, but for the three baselines that ask models something. report, actors and jobs may import it.
"""
