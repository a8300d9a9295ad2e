"""Reports of runs, comparisons and evaluations: self-contained HTML files without network access, or terminal output.

Imports jinja2 and rich; may import `t2g.study` and below. Only jobs and `t2g.marking` import it."""
