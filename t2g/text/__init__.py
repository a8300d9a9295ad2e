"""Texts and tokens: messages to ids, ids to text, tokens to characters, quotes to places.

The lowest room: anybody may import it, it imports records and errors only.
"""
