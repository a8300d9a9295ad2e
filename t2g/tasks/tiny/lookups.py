"""The tiny world of tools: questions about a table, and calls with planted faults.

    table     {"phone": {"price": 7, "weight": 4, ...}, "lamp": {"price": 2, "weight": 5, ...}, ...}
    question  price of phone plus weight of lamp
    calls     lookup(item="phone", field="price") and lookup(item="lamp", field="weight"), in one turn
    results   7 and 5
    call      calculate(left=7, operator="+", right=5)
    result    12
    answer    12

Each record has a table of its own, which the policy sees through the tools alone.
"""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from t2g.config import WorldConfig
from t2g.tasks.tiny.world import is_heldout

ITEMS = ("phone", "lamp", "chair", "clock", "drill", "kettle", "radio", "tent")
FIELDS = ("price", "weight", "height", "stock")
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}  # by the word of a question
VALUES = range(2, 10)
LOOKUP = "lookup"
CALCULATE = "calculate"
OTHER_TOOLS = {LOOKUP: "search", CALCULATE: "compute"}  # which do not exist
OTHER_ARGUMENTS = {"item": "thing", "left": "first"}  # which the tools do not have
NUM_FAULTS = 4  # kinds of calls that a tool refuses

CALL_PHRASES = (
    '<tool_call>{"name": "', '", "arguments": {"', '", "field": "', '": "', '": ', ', "operator": "',
    '", "operator": "', '", "right": ', '"}}</tool_call>', '"}</tool_call>', "}}</tool_call>", "}</tool_call>",
)  # fmt: skip
RESULT_PHRASES = (
    "Error: `", "Error: ValueError: `", "` is ", "` is missing; `", "` is no argument of ", "; it needs to be integer",
    "; the table has no such item", "; the table has no such field", 'Error: there is no tool "',
    f'"; the tools are {LOOKUP}, {CALCULATE}', "Error: the call is no JSON: Expecting ',' delimiter at character ",
    f"{LOOKUP} {CALCULATE}",
)  # fmt: skip

Table = dict[str, dict[str, int]]


class TableCell(NamedTuple):
    """A number of a table."""

    item: str
    field: str


class TableQuestion(NamedTuple):
    """Two numbers of a table and the word between them."""

    left: TableCell
    word: str
    right: TableCell

    def __str__(self) -> str:
        return f"{self.left.field} of {self.left.item} {self.word} {self.right.field} of {self.right.item}"


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


def sample_question(rng: np.random.Generator, *, heldout: bool) -> TableQuestion:
    """Return a question, uniform over the split's questions, which no seed shares with the other split."""
    while True:
        left, right = rng.permutation(len(ITEMS) * len(FIELDS))[:2]
        word = [*OPERATORS][rng.integers(len(OPERATORS))]
        question = TableQuestion(_get_cell(left), word, _get_cell(right))
        if is_heldout([str(question)]) == heldout:
            return question


def _get_cell(number: int) -> TableCell:
    return TableCell(ITEMS[number // len(FIELDS)], FIELDS[number % len(FIELDS)])


def sample_table(rng: np.random.Generator) -> Table:
    values = rng.choice(VALUES, (len(ITEMS), len(FIELDS)))
    return {item: dict(zip(FIELDS, row, strict=True)) for item, row in zip(ITEMS, values.tolist(), strict=True)}


def calculate(left: int, operator: str, right: int) -> int:
    """Return left operator right. ValueError for another operator than +, - and *."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    raise ValueError(f"`operator` is {operator}; it needs to be one of {' '.join(OPERATORS.values())}")


def look_up(table: Table, item: str, field: str) -> int:
    """Return a number of a table. ValueError for one that it does not have."""
    if item not in table:
        raise ValueError(f"`item` is {item}; the table has no such item")
    if field not in table[item]:
        raise ValueError(f"`field` is {field}; the table has no such field")
    return table[item][field]


def find_answer(question: TableQuestion, table: Table) -> int:
    left = look_up(table, *question.left)
    right = look_up(table, *question.right)
    return calculate(left, OPERATORS[question.word], right)


# -------------------------------------------------------------------------------------------------------------- turns
def make_lookups(question: TableQuestion, rates: WorldConfig, rng: np.random.Generator) -> str:
    """Return a turn with the two lookups. Each is another cell with the probability `rates.invented`."""
    text = ""
    for cell in (question.left, question.right):
        if rng.random() < rates.invented:
            cell = _change_cell(cell, rng)
        text += make_call(Call(LOOKUP, cell._asdict()), rates, rng)
    return text


def make_calculation(
    question: TableQuestion, left: int, right: int, rates: WorldConfig, rng: np.random.Generator
) -> str:
    """Return a turn with the calculation, of another operator with the probability `rates.invented`."""
    operator = OPERATORS[question.word]
    if rng.random() < rates.invented:
        operator = str(rng.choice([other for other in OPERATORS.values() if other != operator]))
    arguments = {"left": left, "operator": operator, "right": right}
    return make_call(Call(CALCULATE, arguments), rates, rng)


def make_guess(rng: np.random.Generator) -> str:
    """Return an answer that no tool gave."""
    return str(rng.choice(VALUES) + rng.choice(VALUES))


def make_call(call: Call, rates: WorldConfig, rng: np.random.Generator) -> str:
    """Return a call as the policy's chat template writes it; a tool refuses it with the probability `rates.wrong`."""
    if rng.random() >= rates.wrong:
        return format_call(call)
    kind = rng.integers(NUM_FAULTS)
    if kind == 0:
        return format_call(call._replace(name=OTHER_TOOLS[call.name]))
    if kind == 1:
        return format_call(_rename_first_argument(call))
    if kind == 2:
        return format_call(_change_first_value(call))
    return format_call(call).replace("}}", "}")  # is cut


def _rename_first_argument(call: Call) -> Call:
    first, *others = call.arguments
    arguments = {OTHER_ARGUMENTS[first]: call.arguments[first]}
    arguments |= {name: call.arguments[name] for name in others}
    return call._replace(arguments=arguments)


def _change_first_value(call: Call) -> Call:
    """Return a call with "phones" for "phone", or with "7" for 7."""
    first = next(iter(call.arguments))
    value = str(call.arguments[first])
    if call.name == LOOKUP:
        value += "s"
    return call._replace(arguments=call.arguments | {first: value})


def _change_cell(cell: TableCell, rng: np.random.Generator) -> TableCell:
    if rng.random() < 0.5:
        return cell._replace(item=str(rng.choice([other for other in ITEMS if other != cell.item])))
    return cell._replace(field=str(rng.choice([other for other in FIELDS if other != cell.field])))


def format_call(call: Call) -> str:
    return f"<tool_call>{json.dumps(call._asdict())}</tool_call>"


# ------------------------------------------------------------------------------------------------------------- records
def make_records(*, count: int, heldout: bool, rates: WorldConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Yield questions with their tables and answers. `turn` is the first turn that the base policy learns.

    With the probability `rates.missing` it is a guess instead of calls.
    """
    rng = np.random.default_rng([seed, int(heldout)])
    split = "heldout" if heldout else "train"
    for index in range(count):
        question = sample_question(rng, heldout=heldout)
        table = sample_table(rng)
        is_guess = rng.random() < rates.missing
        turn = make_guess(rng) if is_guess else make_lookups(question, rates, rng)
        yield {
            "question_id": f"tiny-tools-{split}-{seed}-{index}",
            "question": str(question),
            "table": table,
            "answer": str(find_answer(question, table)),
            "turn": turn,
        }


def tokenizer_pieces() -> list[str]:
    """Return the pieces of the policy's tokenizer, as `world.tokenizer_pieces`. A fault is a token."""
    words = [*ITEMS, *FIELDS, *OTHER_TOOLS, *OTHER_TOOLS.values(), *OTHER_ARGUMENTS, *OTHER_ARGUMENTS.values()]
    for item in ITEMS:
        words += [f"{item}s", f" {item}"]
    words += OPERATORS.values()
    for word in OPERATORS:
        words.append(f" {word}")
    for field in FIELDS:
        words += [f"{field} of", f" {field} of"]
    for left, operator, right in product(VALUES, OPERATORS.values(), VALUES):
        words.append(str(calculate(left, operator, right)))
    return sorted(set(words)) * 50 + [*CALL_PHRASES, *RESULT_PHRASES] * 20
