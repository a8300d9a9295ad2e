"""Multiple-choice questions that no method trains on: a measure of what a policy could do before.

The answer is the choice with the highest log-probability per character, so that long choices are not at a
disadvantage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from t2g.config import DataConfig
from t2g.data.load import load_records
from t2g.errors import UserError
from t2g.tasks.base import Record, describe_record, get_text
from t2g.text.tokenizer import encode_texts
from t2g.types import TokenIds


@dataclass(frozen=True)
class Question:
    """A question whose choices continue its prompt."""

    choices: tuple[TokenIds, ...]
    num_chars: tuple[int, ...]  # size of each choice
    answer: int  # index of the right one

    def choose(self, logprobs: Sequence[np.ndarray]) -> int:
        """Return the index of the choice with the highest log-probability per character.

        Args:
            logprobs: Token log-probabilities of each choice.
        """
        scores = [row.sum() / size for row, size in zip(logprobs, self.num_chars, strict=True)]
        return int(np.argmax(scores))


def read_questions(data: DataConfig | None, tokenizer: Any, max_tokens: int) -> list[Question]:
    """Return the questions of `compare.choices`, [] without any.

    Raises:
        UserError: A record lacks a prompt, has fewer than two choices, its answer is no index of one, or a choice and
            the prompt have more than `max_tokens` tokens.
    """
    if data is None:
        return []
    questions = []
    for number, record in enumerate(load_records(data, "compare.choices"), start=1):
        try:
            questions.append(_read_question(record, tokenizer, max_tokens))
        except ValueError as error:
            raise UserError(f"{describe_record(record, number, 'compare.choices')}: {error}") from None
    return questions


def _read_question(record: Record, tokenizer: Any, max_tokens: int) -> Question:
    prompt = get_text(record, "prompt")
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(_is_text(choice) for choice in choices):
        raise ValueError("choices needs two or more texts that are not empty")
    answer = record.get("answer")
    is_index = isinstance(answer, int) and not isinstance(answer, bool)
    if not is_index or not 0 <= answer < len(choices):
        raise ValueError(f"answer={answer!r} needs an index of one of the {len(choices)} choices, from 0")

    (prompt_ids,) = encode_texts(tokenizer, [prompt])
    encoded = []
    for choice_ids in encode_texts(tokenizer, choices):
        num_tokens = len(prompt_ids) + len(choice_ids)
        if num_tokens > max_tokens:
            raise ValueError(
                f"a choice and the prompt have {num_tokens} tokens, above rollout.max_model_len={max_tokens}"
            )
        ids = TokenIds(prompt_ids=np.asarray(prompt_ids, np.int32), response_ids=np.asarray(choice_ids, np.int32))
        encoded.append(ids)
    return Question(choices=tuple(encoded), num_chars=tuple(map(len, choices)), answer=answer)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def choice_accuracy(questions: Sequence[Question], logprobs: Sequence[np.ndarray]) -> float:
    """Return the share of the questions that are answered rightly.

    Args:
        logprobs: Token log-probabilities of the choices of all questions, in order.
    """
    num_right = 0
    rows: Iterator[np.ndarray] = iter(logprobs)
    for question in questions:
        choice_logprobs = [next(rows) for _ in question.choices]
        num_right += question.choose(choice_logprobs) == question.answer
    return num_right / len(questions)
