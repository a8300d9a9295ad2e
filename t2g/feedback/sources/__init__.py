"""Who judges: a language model, a program, a person's file. A prompt and a response in, `SpanFeedback` out.

`make` gives the source that a config names. An answer from outside is untrusted: parsed, bounded, never an exception.
jobs and actors may import it; the rest of t2g knows the Protocol in `t2g.interfaces` only.
"""
