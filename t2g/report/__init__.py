"""The report: numbers and texts in, one HTML file out that opens without a network. Imports jinja2."""
