"""The phases of `jobs.benchmark`: each compares our code against the bare libraries, timed by one timer.

`timer.py` measures, `random_models.py` makes models, `bare.py` and `bare_trl.py` are the bare libraries,
`results.py` the table; the other files are one phase each, with a function `measure(bench)`. Only jobs.benchmark
imports them.
"""
