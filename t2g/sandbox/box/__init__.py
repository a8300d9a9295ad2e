"""What runs inside the sandbox of `t2g.sandbox.run`: a supervisor, the tests, the solution in a process of its own.

May import the standard library and its own modules only: a sandbox must start in milliseconds.
"""
