"""Feedback sources: language model, program, people's file. They map a prompt and a response to `SpanFeedback`.

`make` builds the source that a config names. External answers are untrusted: bounded, and no answer raises.
jobs and actors may import it; the rest of t2g knows the Protocol in `t2g.interfaces` only.
"""
