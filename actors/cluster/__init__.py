"""What every other room needs of Ray: connection, places, calls with deadlines, the job server, a look at the nodes.

Imports no other room of actors.
"""
