"""The phases of `jobs.benchmark`: each is a race of our own way against its limit, run by one stopwatch.

`watch.py` is the stopwatch, `random_models.py` makes models, `bare.py` and `bare_trl.py` are the limits, `results.py`
the table; the other files are one phase each, with a function `measure(bench)`. Only jobs.benchmark imports them.
"""
