"""Reports: numbers and texts in; out comes one HTML file that opens without a network, or lines for a terminal.

Imports jinja2 and rich; may import `t2g.study` and below. Only jobs import it."""
