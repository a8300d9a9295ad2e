"""The built-in tiny worlds: posts of facts with faulty summaries, and verbal rules with faulty programs.

Each has a feedback function, a measure and small models, for `make demo` and the tests. Imports as in `t2g.tasks`.
"""
