"""Conversion of HumanEval problems (Chen et al., arXiv 2107.03374) to KodCode records, for evaluations.

Fields: task_id; prompt, the beginning of a module up to the docstring of the requested function; entry_point, the name
of the function; test, with `check(candidate)`; canonical_solution, the rest of the module.
"""

import re
from collections.abc import Sequence

from t2g.errors import UserError
from t2g.tasks.base import Record, describe_record, get_optional_text, get_text

_IMPORT = re.compile(r"^(?:import|from)\s.*$", re.MULTILINE)
_FUNCTION = re.compile(r"^def\s+(\w+)", re.MULTILINE)


def convert_to_kodcode(records: Sequence[Record]) -> list[Record]:
    """Return KodCode records with `imports`, the prompt's imports, which a response need not repeat.

    Records of another format stay as they are.

    Raises:
        UserError: A field is missing or wrong; with the number of the record (from 1).
    """
    converted = []
    for number, record in enumerate(records, start=1):
        try:
            converted.append(_convert(record) if "entry_point" in record else record)
        except ValueError as error:
            raise UserError(f"{describe_record(record, number)}: {error}") from error
    return converted


def _convert(record: Record) -> Record:
    # The tests import every function of the prompt: the requested function may be the inverse of a given one.
    prompt = get_text(record, "prompt")
    test = get_text(record, "test")
    entry = get_text(record, "entry_point")
    if not entry.isidentifier():
        raise ValueError(f"field entry_point is {entry!r:.80}; it needs the name of a function")
    names = dict.fromkeys([*_FUNCTION.findall(prompt), entry])
    tests = f"from solution import {', '.join(names)}\n\n{test}\n\ndef test_{entry}():\n    check({entry})\n"
    solution = get_optional_text(record, "canonical_solution")
    return {
        "id": record.get("task_id"),
        "question": prompt,
        "test": tests,
        "imports": "\n".join(_IMPORT.findall(prompt)),
        "solution": None if solution is None else prompt + solution,
    }
