"""The built-in tiny worlds: posts that state facts, with faulty summaries; rules in words, with faulty programs. Each
with what judges and what measures, and small models.

What `make demo` and the tests learn on. May import what `t2g.tasks` may.
"""
