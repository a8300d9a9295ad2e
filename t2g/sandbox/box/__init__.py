"""Code that runs in the processes of the sandbox.

There is one parent that has imported pytest. Each run has a supervisor, a process for the tests and one for the
solution. Modules may import the standard library, pytest, numpy and each other only.
"""
