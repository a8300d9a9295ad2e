"""Programs, one per file, each short: read the config, start the fleets, hand them to t2g, run, stop.

May import actors and t2g; anything heavy (ray, torch, actors) only inside functions, so that `--help` takes under a
second.
"""
