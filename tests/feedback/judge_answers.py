"""Answers of judges as they were seen, or as their servers write them, each with the judgement that is meant."""

import json
from typing import Any, NamedTuple

KINDS: dict[str, type] = {"critique": str, "spans": list}
GOOD: dict[str, Any] = {"reasoning": "r", "critique": "The bag is wrong.", "spans": [{"quote": "bag", "label": "poor"}]}
DRAFT: dict[str, Any] = {"reasoning": "d", "critique": "All is right.", "spans": [{"quote": "bag", "label": "good"}]}
OBJECT = json.dumps(GOOD)
DRAFTED = json.dumps(DRAFT)
INDENTED = json.dumps(GOOD, indent=2)


class Answer(NamedTuple):
    """An answer, and the object that is read from it; None: the request is repeated."""

    name: str
    text: str
    meant: dict[str, Any] | None = GOOD


def with_critique(critique: str) -> dict[str, Any]:
    return GOOD | {"critique": critique}


def spell(raw: str) -> str:
    """Return the object with a critique that is spelled so between its quotation marks."""
    return OBJECT.replace("The bag is wrong.", raw)


CLEAN = [
    Answer("plain", OBJECT),
    Answer("indented", INDENTED),
    Answer("blanks around", f"\n\n  {OBJECT}\n"),
    Answer("byte order mark", f"\ufeff{OBJECT}"),
    Answer("further keys", json.dumps(GOOD | {"score": 3}), GOOD | {"score": 3}),
    Answer("other order", json.dumps(dict(reversed(GOOD.items())))),
    Answer("escaped", spell(r"\u201cbag\u201d"), with_critique("\u201cbag\u201d")),
    Answer("escaped quotes", spell(r"\"bag\" is wrong"), with_critique('"bag" is wrong')),
    Answer("braces in a string", spell("f{x} and {y"), with_critique("f{x} and {y")),
    Answer("no spans", json.dumps(GOOD | {"spans": []}), GOOD | {"spans": []}),
]
AROUND = [
    Answer("fence", f"```json\n{OBJECT}\n```"),
    Answer("fence without language", f"```\n{INDENTED}\n```"),
    Answer("sentence before", f"Here is my judgement:\n{OBJECT}"),
    Answer("sentence after", f"{OBJECT}\nI hope this helps!"),
    Answer("braces before", f"The city is {{Berlin}}. {OBJECT}"),
    Answer("braces after", f"{OBJECT} (as {{asked}})"),
    Answer("one brace before", f"A set like {{1, 2 is open. {OBJECT}"),
    Answer("one brace after", f"{OBJECT}\n}}"),
    Answer("quotation mark before", f'A 5" screen: {OBJECT}'),
    Answer("LaTeX before", rf"\frac{{1}}{{2}} is right. {OBJECT}"),
    Answer("code before", f"def f(): return {{'a': 1}}\n{OBJECT}"),
    Answer("other object before", f'The schema is {{"type": "object"}}. {OBJECT}'),
    Answer("other object after", f'{OBJECT} {{"confidence": 0.9}}'),
    Answer("empty object before", f"{{}} {OBJECT}"),
    Answer("list", f"[{OBJECT}]"),
    Answer("XML", f"<answer>{OBJECT}</answer>"),
    Answer("bold", f"**{OBJECT}**"),
    Answer("end of turn", f"{OBJECT}<|im_end|>"),
]
DRAFTS = [
    Answer("twice the same", f"{OBJECT}\n{OBJECT}"),
    Answer("draft before", f"{DRAFTED}\nCorrected:\n{OBJECT}"),
    Answer("draft in fences", f"```json\n{DRAFTED}\n```\nWait.\n```json\n{OBJECT}\n```"),
    Answer("thinking with a draft", f"<think>Perhaps {DRAFTED}?</think>\n{OBJECT}"),
    Answer("thinking without an opening tag", f"Perhaps {DRAFTED}?\n</think>\n{OBJECT}"),
    Answer("thinking with a broken draft", f'<think>{{"critique": "All</think>{OBJECT}'),
    Answer("thinking with braces", f"<think>{{a}} {{b</think>{OBJECT}"),
    Answer("thinking of Magistral", f"[THINK]{DRAFTED}[/THINK]{OBJECT}"),
    Answer("thinking of Command A", f"<|START_THINKING|>{DRAFTED}<|END_THINKING|>{OBJECT}"),
    Answer("thinking of gpt-oss", f"<|channel|>analysis<|message|>{DRAFTED}<|channel|>final<|message|>{OBJECT}"),
    Answer("thinking alone", f"<think>{DRAFTED}</think>\nI cannot say.", None),
    Answer("tag in a string", spell("It writes </think> twice."), with_critique("It writes </think> twice.")),
]
SPELLINGS = [
    Answer("raw line end", spell("The bag\nis wrong."), with_critique("The bag\nis wrong.")),
    Answer("raw tab", spell("The\tbag"), with_critique("The\tbag")),
    Answer("raw carriage return", spell("The bag\r\nis"), with_critique("The bag\r\nis")),
    Answer("control character", spell("The \x07 bag"), with_critique("The \x07 bag")),
    Answer("trailing comma in the object", f"{OBJECT[:-1]},}}"),
    Answer("trailing comma in the list", f"{OBJECT[:-2]},]}}"),
    Answer("trailing commas and lines", INDENTED.replace('"poor"\n', '"poor",\n').replace("}\n  ]", "},\n  ],")),
    Answer("trailing comma and a draft", f"{DRAFTED[:-1]},}} no: {OBJECT[:-1]},}} so."),
    Answer("comma in a string", f"{spell('a list [1,]')[:-1]},}}", with_critique("a list [1,]")),
]
NESTED = [
    Answer("within feedback", json.dumps({"feedback": GOOD})),
    Answer("within two", json.dumps({"response": {"feedback": GOOD}})),
    Answer("beside others", json.dumps({"id": 3, "result": GOOD, "meta": {"model": "m"}})),
    Answer("two within one", json.dumps({"draft": DRAFT, "final": GOOD}), None),
]
NO_ANSWERS = [
    Answer("nothing", "", None),
    Answer("refusal", "I cannot judge this.", None),
    Answer("other keys", '{"verdict": "poor"}', None),
    Answer("wrong type", json.dumps(GOOD | {"spans": "bag"}), None),
    Answer("cut in the spans", OBJECT[:-20], None),
    Answer("cut in the critique", OBJECT[:40], None),
    Answer("quotes that are not escaped", spell('The "bag" is wrong.'), None),
    Answer("quotes that are not escaped, with a comma", spell('It says "bag", "box" is right.'), None),
    Answer("key in the critique", spell('Bad.", "spans": [], "x": "'), None),
]
ANSWERS = [*CLEAN, *AROUND, *DRAFTS, *SPELLINGS, *NESTED, *NO_ANSWERS]
