"""A critic to begin with: it blames words that say nothing, and a sentence that was said before."""

import re

EMPTY = re.compile(r"\b(very|really|basically|actually|simply|just|of course|as an AI[^.,]*)\b", re.IGNORECASE)
SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]*")


def critic(prompt: str, response: str) -> tuple[str, list, list]:
    """A critique in words, good pieces, poor pieces: each a text of the response, (text, 2) for its second place, or a
    range (start, end).
    """
    good, poor, said = [], [match.span() for match in EMPTY.finditer(response)], set()
    for match in SENTENCE.finditer(response):
        words = match.group().strip()
        if words:
            (poor if words in said else good).append(match.span())
            said.add(words)
    blamed = ", ".join(repr(response[start:end].strip()) for start, end in poor) or "nothing"
    return f"It should say something new in every sentence, in plain words. To be mended: {blamed}.", good, poor
