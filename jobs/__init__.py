"""Programs: one file each, or a package with a `__main__` for a job of several files.

A program is short: it reads the config, starts the fleets, hands them to t2g, runs and stops.

`api` has train, annotate and evaluate as functions; these programs are written on it.

May import actors and t2g; anything heavy (ray, torch, actors) only inside functions, so that `--help` takes under a
second.
"""
