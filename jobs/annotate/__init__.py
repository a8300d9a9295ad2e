"""Write critiques and spans for responses: the command is `__main__`, a run is in `annotation_runs`."""
