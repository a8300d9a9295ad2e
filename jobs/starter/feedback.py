"""A feedback function to start from: it blames empty phrases and repeated sentences."""

import re

EMPTY = re.compile(r"\b(very|really|basically|actually|simply|just|of course|as an AI[^.,]*)\b", re.IGNORECASE)
SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]*")


def judge(prompt: str, response: str) -> tuple[str, list, list]:
    """Return a critique, the good pieces and the poor pieces of a response.

    A piece is a text of the response, (text, 2) for its second occurrence, or a character range (start, end).
    """
    good: list[tuple[int, int]] = []
    poor = [match.span() for match in EMPTY.finditer(response)]
    earlier: set[str] = set()
    for match in SENTENCE.finditer(response):
        sentence = match.group().strip()
        if not sentence:
            continue
        if sentence in earlier:
            poor.append(match.span())
        else:
            good.append(match.span())
        earlier.add(sentence)
    quotes = [repr(response[start:end].strip()) for start, end in poor]
    blamed = ", ".join(quotes) or "nothing"
    return f"It should say something new in every sentence, in plain words. To be mended: {blamed}.", good, poor
