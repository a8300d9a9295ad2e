"""HumanEval's format: prompts, passing solutions, and imports that a response need not repeat."""

from typing import Any

import pytest

from t2g.errors import UserError
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import get_task
from t2g.tasks.human_eval import convert_to_kodcode
from t2g.types import Prompt

TASK = get_task("code")
RECORD = {
    "task_id": "HumanEval/50",
    "prompt": (
        "from typing import List\n\n\ndef encode(values: List[int]) -> List[int]:\n    return [v + 1 for v in values]"
        '\n\n\ndef decode(values: List[int]) -> List[int]:\n    """The inverse of encode."""\n'
    ),
    "canonical_solution": "    return [v - 1 for v in values]\n",
    "test": (
        "METADATA = {}\n\n\ndef check(candidate):\n    for values in ([1], [2, 3], []):\n"
        "        assert candidate(encode(values)) == values\n"
    ),
    "entry_point": "decode",
}


(KODCODE,) = convert_to_kodcode([RECORD])


def passed(response: str, record: dict[str, Any] = KODCODE) -> float:
    prompt = Prompt(prompt_id="1", prompt_text="p", task="code", payload=TASK.payload(record))
    return TASK.measure(prompt, response, sandbox=SandboxConfig(require=()))["passed"]


def test_a_record_becomes_one_of_kodcode() -> None:
    assert TASK.prompt_id(KODCODE) == "HumanEval/50"
    assert convert_to_kodcode([KODCODE])[0] is KODCODE
    text = TASK.prompt_text(KODCODE)
    assert text.startswith("from typing") and text.endswith("import from your program: encode, decode")
    assert KODCODE["imports"] == "from typing import List"
    assert KODCODE["solution"] == RECORD["prompt"] + RECORD["canonical_solution"]
    assert convert_to_kodcode([{**RECORD, "canonical_solution": None}])[0]["solution"] is None


def test_its_own_solution_passes_and_a_wrong_one_does_not() -> None:
    assert passed(TASK.reference(KODCODE)) == 1
    assert passed(TASK.reference(KODCODE).replace("v - 1", "v - 2")) == 0


def test_an_answer_need_not_repeat_the_prompts_imports() -> None:
    answer = TASK.reference(KODCODE).replace("from typing import List\n", "")
    assert "import" not in answer and passed(answer) == 1
    assert passed(f"from __future__ import annotations\n{answer}") == 1
    assert passed("def decode(values): return [v - 1 for v in values]") == 0  # encode was given, and is not there


@pytest.mark.parametrize(
    ("changed", "fact"),
    [({"entry_point": "os.system"}, "entry_point"), ({"test": ""}, "test"), ({"prompt": 3}, "prompt")],
)
def test_a_broken_record_is_refused_by_its_field(changed: dict[str, Any], fact: str) -> None:
    with pytest.raises(UserError, match=f"record 2: field {fact} "):
        convert_to_kodcode([RECORD, {**RECORD, **changed}])
