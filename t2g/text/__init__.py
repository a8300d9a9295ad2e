"""Texts and tokens: messages to ids, ids to text, tokens to characters, quotes to character ranges.

The lowest layer: every package may import it, and it imports records and errors only.
"""
