"""The phases of `jobs.benchmark`: each is a race of our code against the bare libraries, run by one stopwatch.

`watch.py` is the stopwatch, `random_models.py` makes models, `bare.py` and `bare_trl.py` are the bare libraries,
`results.py` the table; the other files are one phase each, with a function `measure(bench)`. Only jobs.benchmark
imports them.
"""
