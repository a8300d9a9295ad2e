import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import letter_tokenizer

from t2g.config import DataConfig
from t2g.errors import UserError
from t2g.study.choices import choice_accuracy, read_questions

QUESTION = {"prompt": "ab", "choices": ["c", "cab"], "answer": 1}


def write(folder: Path, *records: dict[str, Any]) -> DataConfig:
    file = folder / "choices.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return DataConfig(path=str(file))


def test_choices_continue_their_prompt(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    (question,) = read_questions(write(tmp_path, QUESTION), tokenizer, 8)
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "c", "cab")]
    assert [choice.prompt_ids.tolist() for choice in question.choices] == [expected[0]] * 2
    assert [choice.response_ids.tolist() for choice in question.choices] == expected[1:]
    assert (question.num_chars, question.answer) == ((1, 3), 1)
    assert read_questions(None, tokenizer, 8) == []


def test_the_likeliest_choice_a_character_is_the_answer(tmp_path: Path) -> None:
    """-1 for one character; -2.4 for three, which is -.8 a character."""
    questions = read_questions(write(tmp_path, QUESTION, QUESTION | {"answer": 0}), letter_tokenizer(tmp_path), 8)
    long_wins = [np.array([-1.0]), np.array([-0.4, -1.0, -1.0])]
    short_wins = [np.array([-0.7]), np.array([-0.4, -1.0, -1.0])]
    assert choice_accuracy(questions, long_wins + short_wins) == 1.0
    assert choice_accuracy(questions, short_wins + short_wins) == 0.5
    assert choice_accuracy(questions, short_wins + long_wins) == 0.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "abcabc"}, "9 tokens"),
        ({"choices": ["c"]}, "choices"),
        ({"choices": ["c", ""]}, "choices"),
        ({"choices": "cab"}, "choices"),
        ({"answer": 2}, "answer=2"),
        ({"answer": -1}, "answer=-1"),
        ({"answer": "b"}, "answer='b'"),
        ({"answer": None}, "answer=None"),
        ({"answer": True}, "answer=True"),
    ],
)
def test_a_record_that_is_no_question_is_refused(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    data = write(tmp_path, QUESTION, QUESTION | change)
    with pytest.raises(UserError) as refused:
        read_questions(data, letter_tokenizer(tmp_path), 8)
    assert "compare.choices record 2 (choices.jsonl:2)" in str(refused.value)
    assert field in str(refused.value)
