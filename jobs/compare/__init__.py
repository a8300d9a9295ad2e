"""Train by several methods and compare them: `comparison_runs` makes the runs, `comparison_report` the figures."""
