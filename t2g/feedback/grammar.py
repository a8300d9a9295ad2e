"""The grammar of a reward model's answers, for guided decoding."""

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
    """Return the grammar (EBNF of xgrammar) of exactly the JSON that `t2g.feedback.parse` formats, bounded in length.

    A JSON schema does not work: with `maxLength` xgrammar (0.2.8) allows no escape, so that a quote could not contain a
    quotation mark or a line end. vLLM would also use other separators than the training examples. A text of n
    characters with up to n / 40 escapes fits into a bound of n; no text exceeds 2 n + 39 characters.

    Args:
        critique_suffix: The rest of a given critique, as JSON; see `format_answer_prefix`.
    """
    critique = ""
    if critique_suffix is not None:
        literal = _escape(critique_suffix)
        start = f'"{literal}\\", "'
    elif style.critique:
        start = '"{\\"critique\\": \\"" critique "\\", "'
        critique = _bounded_text("critique", max_critique_chars)
    else:
        start = '"{"'

    quotes = '"[]"'
    if max_spans:
        more = f'(", " quote){{0,{max_spans - 1}}}'
        quotes = f'"[]" | "[" quote {more} "]"'
    return f"""
root ::= {start} "\\"good\\": " quotes ", \\"poor\\": " quotes "}}"
quotes ::= {quotes}
quote ::= "\\"" text "\\"" | "{{\\"quote\\": \\"" text "\\"" (occurrence severity? | severity) "}}"
occurrence ::= ", \\"occurrence\\": " ([2-9] | [1-9] [0-9])
severity ::= ", \\"severity\\": " [2-3]
{critique}
{_bounded_text("text", max_quote_chars)}
escape ::= "\\\\" (["\\\\bfnrt] | "u00" [0-1] [0-9a-f])
"""


def _escape(json_text: str) -> str:
    """Return a text for a literal of the grammar. JSON has no control characters."""
    return json_text.replace("\\", "\\\\").replace('"', '\\"')


def _bounded_text(rule: str, max_chars: int) -> str:
    """Return rules for a text as blocks, each full or ended by an escape, and a remainder. The parse is unique.

    A rule that counts single characters, escapes included, takes 30 ms per token; these rules take 0.3 ms.
    """
    plain = r'[^"\\\x00-\x1F]'
    max_blocks = max_chars * 2 // BLOCK
    max_rest = min(max_chars, BLOCK - 1)
    text = f"{rule} ::= {rule}_block{{0,{max_blocks}}} {plain}{{0,{max_rest}}}"

    full_block = f"{plain}{{{BLOCK},{BLOCK}}}"
    escaped_block = f"{plain}{{0,{BLOCK - 1}}} escape"
    block = f"{rule}_block ::= {full_block} | {escaped_block}"
    return f"{text}\n{block}"
