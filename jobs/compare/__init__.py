"""Train by several methods and compare them: the command is `__main__`, its runs are in `comparison_runs`."""
