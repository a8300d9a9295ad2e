"""Revisions in the tiny world: training examples that correct a response by its critique.

The base policy of the tiny world never read a critique. These examples train a policy that revises. The corrections
come from the world's own facts; the policy does not learn to revise by itself.

    response  by Zoë, about a laptop, sells honey.
    critique  The thing is phone, it says laptop: wrong. It says sells honey: invented. The place is missing.
    corrected by Zoë, about a phone, in Oslo.
"""

import re
from collections.abc import Collection, Sequence

import numpy as np

from t2g.tasks.tiny.world import MISSING, Facts, judge_clauses, make_clause


def split_sentences(critique: str) -> list[str]:
    """Return the critique's sentences. No value or clause contains a full stop."""
    return re.split(r"(?<=\.) ", critique) if critique else []


def correct_response(facts: Facts, response: str, critique: str) -> str:
    """Return `response`, corrected where `critique` holds the sentence that feedback gives for the clause.

    - A clause that the critique calls wrong states the fact.
    - An invented or repeated clause is dropped, and so is a corrected clause that repeats an earlier one.
    - A missing fact is inserted before the first clause about a later slot.
    - Clauses and missing facts that the critique does not mention stay unchanged.

    The result is "." if no clause remains.
    """
    sentences = set(split_sentences(critique))
    clauses: list[tuple[str | None, str]] = []  # slot and text
    for clause, _, sentence in judge_clauses(facts, response):
        text = response[clause.start : clause.end]
        if sentence in sentences:
            if clause.slot is None:
                continue
            text = make_clause(clause.slot, facts[clause.slot])
            if (clause.slot, text) in clauses:
                continue
        clauses.append((clause.slot, text))
    slots = list(facts)
    for number, slot in enumerate(slots):
        stated = [other for other, _ in clauses]
        if slot in stated or MISSING.format(slot) not in sentences:
            continue
        position = _find_first(stated, slots[number + 1 :])
        text = make_clause(slot, facts[slot])
        clauses.insert(position, (slot, text))
    return ", ".join(text for _, text in clauses) + "."


def _find_first(stated: Sequence[str | None], slots: Collection[str]) -> int:
    """Return the position of the first of the slots that are stated, or the end if there is none."""
    for position, slot in enumerate(stated):
        if slot in slots:
            return position
    return len(stated)


def drop_sentences(critique: str, rng: np.random.Generator, *, dropped: float = 0.3) -> str:
    """Return `critique` without a random share of its sentences.

    If every critique named every fault, the right response would follow from the post alone, and the trained policy
    would ignore the critique.
    """
    sentences = [sentence for sentence in split_sentences(critique) if rng.random() >= dropped]
    return " ".join(sentences)
