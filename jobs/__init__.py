"""Programs, one per file, each short: read the config, start the fleets, hand them to t2g, run, stop.

`api` has train, annotate and evaluate as functions; these programs are written on it.

May import actors and t2g; anything heavy (ray, torch, actors) only inside functions, so that `--help` takes under a
second.
"""
