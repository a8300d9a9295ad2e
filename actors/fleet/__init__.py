"""Fleets of workers that answer requests, with replacement of failed workers.

`health` decides the state of a worker, `admission` assigns requests, `fleet_worker` is one worker, `fleet` all of them.
`steering` sets the sizes of a run's fleets. This package does not know vLLM.
"""
