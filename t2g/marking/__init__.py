"""Annotation by people: a page on loopback to mark responses on, the marks of each person, and their agreement.

May import `t2g.report` and below. Only jobs import it."""
