"""What runs in the processes of the sandbox: a parent that holds pytest ready, and per run a supervisor, the tests and
the solution.

May import the standard library, pytest, numpy and its own modules only.
"""
