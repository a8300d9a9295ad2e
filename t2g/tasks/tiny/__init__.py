"""The built-in tiny world: posts that state facts, summaries with planted faults, a critic, a measure, small models.

What `make demo` and the tests learn on. May import what `t2g.tasks` may.
"""
