"""HumanEval (Chen et al., arXiv 2107.03374): the code task on problems of that format, read as they are published.

Understood fields: task_id; prompt, the beginning of a module up to the docstring of the function that is asked for;
entry_point, its name; test, with `check(candidate)`; canonical_solution, the rest of the module.
"""

import re
from typing import Any

from t2g.tasks.base import Record, text_field
from t2g.tasks.code import CodeTask

_IMPORT = re.compile(r"^(?:import|from)\s.*$", re.MULTILINE)
_FUNCTION = re.compile(r"^def\s+(\w+)", re.MULTILINE)


class HumanEvalTask(CodeTask):
    name = "human_eval"

    def prompt_id(self, record: Record) -> str | None:
        return super().prompt_id(as_kodcode(record))

    def prompt_text(self, record: Record) -> str:
        return super().prompt_text(as_kodcode(record))

    def payload(self, record: Record) -> dict[str, Any]:
        return super().payload(as_kodcode(record))

    def reference(self, record: Record) -> str | None:
        return super().reference(as_kodcode(record))

    def response(self, record: Record) -> str | None:
        return super().response(as_kodcode(record))


def as_kodcode(record: Record) -> Record:
    """A KodCode record, with `imports`: those of the prompt, which an answer need not say again. Another stays itself.

    The tests import every function of the prompt: the one that is asked for may be the inverse of a given one.
    """
    if "entry_point" not in record:
        return record
    prompt, test, entry = (text_field(record, name) for name in ("prompt", "test", "entry_point"))
    if not entry.isidentifier():
        raise ValueError(f"field entry_point is {entry!r:.80}; it needs the name of a function")
    names = ", ".join(dict.fromkeys([*_FUNCTION.findall(prompt), entry]))
    converted = {
        "id": record.get("task_id"),
        "question": prompt,
        "test": f"from solution import {names}\n\n{test}\n\ndef test_{entry}():\n    check({entry})\n",
        "imports": "\n".join(_IMPORT.findall(prompt)),
        "response": record.get("response"),
    }
    if record.get("canonical_solution") is not None:
        converted["solution"] = prompt + text_field(record, "canonical_solution")
    return converted
