"""The answers that guided decoding lets a reward model write."""

from t2g.config import StyleConfig
from t2g.tasks.base import SPARSE

BLOCK = 40  # characters of a block of a bounded text


def make_answer_grammar(
    *,
    max_critique_chars: int,
    max_spans: int,
    max_quote_chars: int,
    style: StyleConfig = SPARSE,
    critique_suffix: str | None = None,
) -> str:
    """Grammar (EBNF as xgrammar reads it) of exactly the JSON that `t2g.feedback.parse` formats, bounded in length.

    A JSON schema will not do for this: with `maxLength` xgrammar (0.2.8) allows no escape, so that no quote could hold
    a quotation mark or a line end, and vLLM then writes other separators than those of training. A text of n characters
    with up to n / 40 escapes always fits into a bound of n, and none is longer than 2 n + 39.

    critique_suffix: the part of `format_answer_prefix` that is yet to be written, as JSON.
    """
    more = f'(", " quote){{0,{max_spans - 1}}}'
    if critique_suffix is not None:
        literal = critique_suffix.replace("\\", "\\\\").replace('"', '\\"')  # it is JSON: no control characters in it
        start, critique = f'"{literal}\\", "', ""
    elif style.critique:
        start = '"{\\"critique\\": \\"" critique "\\", "'
        critique = _bounded_text("critique", max_critique_chars)
    else:
        start, critique = '"{"', ""
    return f"""
root ::= {start} "\\"good\\": " quotes ", \\"poor\\": " quotes "}}"
quotes ::= "[]"{f' | "[" quote {more} "]"' if max_spans else ""}
quote ::= "\\"" text "\\"" | "{{\\"quote\\": \\"" text "\\"" (occurrence severity? | severity) "}}"
occurrence ::= ", \\"occurrence\\": " ([2-9] | [1-9] [0-9])
severity ::= ", \\"severity\\": " [2-3]
{critique}
{_bounded_text("text", max_quote_chars)}
escape ::= "\\\\" (["\\\\bfnrt] | "u00" [0-1] [0-9a-f])
"""


def _bounded_text(rule: str, max_chars: int) -> str:
    """Blocks that end with their escape or are full, then a rest: there is one way only to read a text.

    Characters counted one by one, escapes among them, would cost 30 ms a token; this costs 0.3 ms.
    """
    plain = r'[^"\\\x00-\x1F]'
    return (
        f"{rule} ::= {rule}_block{{0,{max_chars * 2 // BLOCK}}} {plain}{{0,{min(max_chars, BLOCK - 1)}}}\n"
        f"{rule}_block ::= {plain}{{{BLOCK},{BLOCK}}} | {plain}{{0,{BLOCK - 1}}} escape"
    )
