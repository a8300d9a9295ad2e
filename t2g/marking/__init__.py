"""Marking by hand: responses in; out come a page on loopback, what each person said of them, and how far two agree.

May import `t2g.report` and below. Only jobs import it."""
