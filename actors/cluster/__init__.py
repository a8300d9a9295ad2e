"""Ray for the other packages: connection, placement, calls with deadlines, the job server, checks of the nodes.

Imports no other package of actors.
"""
