"""The built-in tiny worlds: posts of facts with faulty summaries, verbal rules with faulty programs, and tables.

Each has a source of feedback, a measure and small models, for `make demo` and the tests. Imports as in `t2g.tasks`.
"""
