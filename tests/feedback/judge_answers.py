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


def fill(texts: dict[str, str]) -> list[Answer]:
    """Return an answer for each text, with the object, the indented object and the draft in place of their names."""
    answers = []
    for name, text in texts.items():
        filled = text.replace("OBJECT", OBJECT).replace("INDENTED", INDENTED).replace("DRAFTED", DRAFTED)
        answers.append(Answer(name, filled))
    return answers


WITHOUT_SPANS = GOOD | {"spans": []}
CLEAN = [
    Answer("braces in a string", spell("f{x} and {y"), with_critique("f{x} and {y")),
    Answer("no spans", json.dumps(WITHOUT_SPANS), WITHOUT_SPANS),
    Answer("escaped", spell(r"\u201cbag\u201d"), with_critique("\u201cbag\u201d")),
    Answer("escaped quotes", spell(r"\"bag\" is wrong"), with_critique('"bag" is wrong')),
]
CLEAN += fill(
    {"plain": "OBJECT", "indented": "INDENTED", "blanks around": "\n\n  OBJECT\n", "byte order mark": "\ufeffOBJECT"}
)
WITH_SCORE = GOOD | {"score": 3}
OTHER_ORDER = dict(reversed(GOOD.items()))
CLEAN += [
    Answer("further keys", json.dumps(WITH_SCORE), WITH_SCORE),
    Answer("other order", json.dumps(OTHER_ORDER)),
]
AROUND = fill({
    "fence": "```json\nOBJECT\n```",
    "fence without language": "```\nINDENTED\n```",
    "sentence before": "Here is my judgement:\nOBJECT",
    "sentence after": "OBJECT\nI hope this helps!",
    "braces before": "The city is {Berlin}. OBJECT",
    "braces after": "OBJECT (as {asked})",
    "one brace before": "A set like {1, 2 is open. OBJECT",
    "one brace after": "OBJECT\n}",
    "quotation mark before": 'A 5" screen: OBJECT',
    "LaTeX before": r"\frac{1}{2} is right. OBJECT",
    "code before": "def f(): return {'a': 1}\nOBJECT",
    "other object before": 'The schema is {"type": "object"}. OBJECT',
    "other object after": 'OBJECT {"confidence": 0.9}',
    "empty object before": "{} OBJECT",
    "list": "[OBJECT]",
    "XML": "<answer>OBJECT</answer>",
    "bold": "**OBJECT**",
    "end of turn": "OBJECT<|im_end|>",
})  # fmt: skip
DRAFTS = fill({
    "twice the same": "OBJECT\nOBJECT",
    "draft before": "DRAFTED\nCorrected:\nOBJECT",
    "draft in fences": "```json\nDRAFTED\n```\nWait.\n```json\nOBJECT\n```",
    "thinking with a draft": "<think>Perhaps DRAFTED?</think>\nOBJECT",
    "thinking without an opening tag": "Perhaps DRAFTED?\n</think>\nOBJECT",
    "thinking with a broken draft": '<think>{"critique": "All</think>OBJECT',
    "thinking with braces": "<think>{a} {b</think>OBJECT",
    "thinking of Magistral": "[THINK]DRAFTED[/THINK]OBJECT",
    "thinking of Command A": "<|START_THINKING|>DRAFTED<|END_THINKING|>OBJECT",
    "thinking of gpt-oss": "<|channel|>analysis<|message|>DRAFTED<|channel|>final<|message|>OBJECT",
})  # fmt: skip
DRAFTS += [
    Answer("thinking alone", f"<think>{DRAFTED}</think>\nI cannot say.", None),
    Answer("tag in a string", spell("It writes </think> twice."), with_critique("It writes </think> twice.")),
]
WITH_COMMAS = INDENTED.replace('"poor"\n', '"poor",\n').replace("}\n  ]", "},\n  ],")
SPELLINGS = [
    Answer("raw line end", spell("The bag\nis wrong."), with_critique("The bag\nis wrong.")),
    Answer("raw tab", spell("The\tbag"), with_critique("The\tbag")),
    Answer("raw carriage return", spell("The bag\r\nis"), with_critique("The bag\r\nis")),
    Answer("control character", spell("The \x07 bag"), with_critique("The \x07 bag")),
]
DRAFT_WITH_COMMA = f"{DRAFTED[:-1]},}} no: {OBJECT[:-1]},}} so."
LIST_IN_STRING = f"{spell('a list [1,]')[:-1]},}}"
SPELLINGS += [
    Answer("trailing comma in the object", f"{OBJECT[:-1]},}}"),
    Answer("trailing comma in the list", f"{OBJECT[:-2]},]}}"),
    Answer("trailing commas and lines", WITH_COMMAS),
    Answer("trailing comma and a draft", DRAFT_WITH_COMMA),
    Answer("comma in a string", LIST_IN_STRING, with_critique("a list [1,]")),
]
NESTED = [
    Answer("within feedback", json.dumps({"feedback": GOOD})),
    Answer("within two", json.dumps({"response": {"feedback": GOOD}})),
    Answer("beside others", json.dumps({"id": 3, "result": GOOD, "meta": {"model": "m"}})),
]
NESTED.append(Answer("two within one", json.dumps({"draft": DRAFT, "final": GOOD}), None))
FORMAT = '{"critique": "...", "spans": []}\n'
INVALID_ESCAPE = spell(r"It\'s wrong.")
LONG_TEXT = "x" * 70_000
SETS = '{"a": x} ' * 500
UNESCAPED = spell('The "bag" is wrong.')
UNREADABLE = {
    "a draft before quotes that are not escaped": f"{DRAFTED}\nCorrected:\n{UNESCAPED}",
    "a draft and a broken answer in one object": f'{{"draft": {DRAFTED}, "final": {UNESCAPED}}}',
    "a draft before an answer that was cut": f"{DRAFTED}\nCorrected:\n{OBJECT[:-9]}",
    "the format before an invalid escape": FORMAT + INVALID_ESCAPE,
}
LISTS = {
    "a list of two": f"[{DRAFTED},\n{OBJECT}]",
    "one on each line": f"{DRAFTED}\n{OBJECT}",
    "a list of two and another object": f'[{DRAFTED}, {{"n": 1}}, {OBJECT}]',
}
LATER = [Answer(name, text, None) for name, text in (UNREADABLE | LISTS).items()]
LATER.append(Answer("keys without an object", f'{OBJECT} I wrote "critique": first and "spans": last.'))
LONG_THINKING = [
    Answer("after long thinking", f"<think>{LONG_TEXT}</think>{OBJECT}"),
    Answer("after thinking about many sets", f"<think>{SETS}[1,]</think>{OBJECT}"),
]
WRONG_TYPE = GOOD | {"spans": "bag"}
NO_ANSWERS = [
    Answer("nothing", "", None),
    Answer("refusal", "I cannot judge this.", None),
    Answer("other keys", '{"verdict": "poor"}', None),
    Answer("wrong type", json.dumps(WRONG_TYPE), None),
    Answer("cut in the spans", OBJECT[:-20], None),
    Answer("cut in the critique", OBJECT[:40], None),
]
NO_ANSWERS += [
    Answer("quotes that are not escaped", spell('The "bag" is wrong.'), None),
    Answer("quotes that are not escaped, with a comma", spell('It says "bag", "box" is right.'), None),
    Answer("key in the critique", spell('Bad.", "spans": [], "x": "'), None),
]
ANSWERS = [*CLEAN, *AROUND, *DRAFTS, *SPELLINGS, *NESTED, *LATER, *LONG_THINKING, *NO_ANSWERS]
