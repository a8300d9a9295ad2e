r"""Quotes whose backslashes a judge did not double in JSON, or doubled twice.

A judge that quotes `split('\n')` from a line of code often writes one backslash, which JSON reads as a line end; of
`\frac` it leaves a form feed. Some judges write two where one is needed.
"""

import re

from t2g.feedback.parse import Quote

_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f", "\b": r"\b"}
MAX_CONTROLS = 50  # in a quote; a search takes at most this many steps for each character of the response
_NEVER_IN_TEXT = {"\f", "\b"}  # a fix with one of them meant its escape
_DOUBLED = re.compile(r'\\([nt"\\])')
_MEANINGS = {"n": "\n", "t": "\t"}


def correct_escapes(quote: Quote, response_text: str) -> Quote:
    """Return the quote and its fix with the backslashes of the response; the quote is unchanged if none is found.

    The fix is dropped where the quote has both line ends and escaped ones: which of them the fix means is not known.
    """
    fix = None if quote.fix is None else _escape(quote.fix, _NEVER_IN_TEXT)
    quote = quote.model_copy(update={"fix": fix})
    if quote.quote in response_text:
        return quote
    match = _search(quote.quote, response_text)
    if match is not None:
        controls = {char for char in _ESCAPES if char in quote.quote}
        escaped = {char for char in controls if _ESCAPES[char] in match}
        is_mixed = any(char in match for char in escaped)
        fix = None if fix is None or is_mixed else _escape(fix, escaped)
        return quote.model_copy(update={"quote": match, "fix": fix})

    single = _unescape_once(quote.quote)
    if single in response_text:
        fix = None if fix is None else _unescape_once(fix)
        return quote.model_copy(update={"quote": single, "fix": fix})
    return quote


def _search(quote: str, text: str) -> str | None:
    """Return the first match of a quote in which each control character may also be escaped with a backslash."""
    num_controls = sum(map(quote.count, _ESCAPES))
    if not 0 < num_controls <= MAX_CONTROLS:
        return None
    parts: list[str] = []
    for char in quote:
        part = re.escape(char)
        if char in _ESCAPES:
            part = f"(?:{re.escape(_ESCAPES[char])}|{part})"
        parts.append(part)
    match = re.search("".join(parts), text)
    return None if match is None else match[0]


def _escape(text: str, chars: set[str]) -> str:
    for char in chars:
        text = text.replace(char, _ESCAPES[char])
    return text


def _unescape_once(text: str) -> str:
    return _DOUBLED.sub(lambda match: _MEANINGS.get(match[1], match[1]), text)
