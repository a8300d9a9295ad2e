"""Comparisons of methods, and evaluation of policies and reward models.

In: method files and what runs wrote. Out: configs of runs, and figures. Only the baselines, `reflection` and
`targeting` call models. report, actors and jobs may import this package.
"""
