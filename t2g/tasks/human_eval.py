"""HumanEval (Chen et al., arXiv 2107.03374) as KodCode: one converter, for evaluations on problems of that format.

Understood fields: task_id; prompt, the beginning of a module up to the docstring of the function that is asked for;
entry_point, its name; test, with `check(candidate)`; canonical_solution, the rest of the module.
"""

import re
from collections.abc import Sequence

from t2g.errors import UserError
from t2g.tasks.base import Record, optional_text, text_field

_IMPORT = re.compile(r"^(?:import|from)\s.*$", re.MULTILINE)
_FUNCTION = re.compile(r"^def\s+(\w+)", re.MULTILINE)


def as_kodcode(records: Sequence[Record]) -> list[Record]:
    """KodCode records, with `imports`: those of the prompt, which an answer need not say again. Those of another format
    stay themselves. UserError, with the number of the record (from 1), for a field that is missing or wrong.
    """
    converted = []
    for number, record in enumerate(records, start=1):
        try:
            converted.append(_converted(record) if "entry_point" in record else record)
        except ValueError as error:
            raise UserError(f"data record {number}: {error}") from error
    return converted


def _converted(record: Record) -> Record:
    """The tests import every function of the prompt: the one that is asked for may be the inverse of a given one."""
    prompt, test, entry = (text_field(record, name) for name in ("prompt", "test", "entry_point"))
    if not entry.isidentifier():
        raise ValueError(f"field entry_point is {entry!r:.80}; it needs the name of a function")
    names = ", ".join(dict.fromkeys([*_FUNCTION.findall(prompt), entry]))
    solution = optional_text(record, "canonical_solution")
    return {
        "id": record.get("task_id"),
        "question": prompt,
        "test": f"from solution import {names}\n\n{test}\n\ndef test_{entry}():\n    check({entry})\n",
        "imports": "\n".join(_IMPORT.findall(prompt)),
        "solution": None if solution is None else prompt + solution,
    }
