"""Train by several methods and compare them: `comparison_plan`, then `comparison_runs`, then `comparison_report`.

`comparison_rewards` makes reward models before the runs; `reference_responses` measures what each run changed.
"""
