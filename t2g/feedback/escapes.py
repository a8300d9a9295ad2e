r"""Quotes whose backslashes a judge did not double in JSON, or doubled twice.

A judge that quotes `split('\n')` from a line of code often writes one backslash, which JSON reads as a line end; of
`\frac` it leaves a form feed. Some judges write two where one is needed.
"""

import re

from t2g.feedback.parse import Quote

_SPELLINGS = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f", "\b": r"\b"}
_NEVER_IN_TEXT = {"\f", "\b"}  # a fix with one of them meant its spelling
_DOUBLED = re.compile(r'\\([nt"\\])')
_MEANINGS = {"n": "\n", "t": "\t"}


def correct_escapes(quote: Quote, response_text: str) -> Quote:
    """Return the quote and its fix with the backslashes of the response; unchanged where that finds no match either."""
    if quote.quote in response_text:
        return quote
    fix = quote.fix
    match = _pattern(quote.quote).search(response_text) if _SPELLINGS.keys() & set(quote.quote) else None
    if match is not None:
        spelled = {char for char, spelling in _SPELLINGS.items() if char in quote.quote and spelling in match[0]}
        fix = None if fix is None else _spell(fix, spelled | _NEVER_IN_TEXT)
        return quote.model_copy(update={"quote": match[0], "fix": fix})

    single = _undouble(quote.quote)
    if single in response_text:
        fix = None if fix is None else _undouble(fix)
        return quote.model_copy(update={"quote": single, "fix": fix})
    return quote


def _pattern(quote: str) -> re.Pattern[str]:
    """Return the pattern of a quote in which each control character may also be spelled with a backslash."""
    parts: list[str] = []
    for char in quote:
        part = re.escape(char)
        if char in _SPELLINGS:
            part = f"(?:{re.escape(_SPELLINGS[char])}|{part})"
        parts.append(part)
    return re.compile("".join(parts))


def _spell(text: str, chars: set[str]) -> str:
    for char in chars:
        text = text.replace(char, _SPELLINGS[char])
    return text


def _undouble(text: str) -> str:
    return _DOUBLED.sub(lambda match: _MEANINGS.get(match[1], match[1]), text)
