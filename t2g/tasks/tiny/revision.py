"""Revision in the tiny world: what a writer who believes a critique would write.

The base policy of the tiny world never read a critique, so a reviser is taught by examples that this file makes. What
it is not: a policy that learnt to revise by itself. Its corrections come from the world's own facts.

    response  by Zoë, about a laptop, sells honey.
    critique  The thing is phone, it says laptop: wrong. It says sells honey: invented. The place is missing.
    corrected by Zoë, about a phone, in Oslo.
"""

import re

import numpy as np

from t2g.tasks.tiny.world import MISSING, Facts, findings, write_clause

DROPPED = 0.3  # share of a critique's sentences that an example leaves out


def sentences(critique: str) -> list[str]:
    """The critique's sentences: no value or clause has a full stop in it."""
    return re.split(r"(?<=\.) ", critique) if critique else []


def corrected(facts: Facts, response: str, critique: str) -> str:
    """Return `response`, corrected where `critique` holds the sentence that feedback gives for the clause.

    A clause that is said to be wrong states the fact, one said to be invented or repeated is dropped, and so is one
    that then says again what stands before it. A fact said to be missing is added before the first clause about a later
    slot. A clause of which nothing is said stays as it is, be it right or wrong, and a missing fact that the critique
    does not mention stays missing. "." where nothing is left.
    """
    said = set(sentences(critique))
    clauses: list[tuple[str | None, str]] = []  # slot and text
    for clause, _, sentence in findings(facts, response):
        text = response[clause.start : clause.end]
        if sentence in said:
            if clause.slot is None:
                continue
            text = write_clause(clause.slot, facts[clause.slot])
            if (clause.slot, text) in clauses:
                continue
        clauses.append((clause.slot, text))
    order = list(facts)
    for slot in order:
        if MISSING.format(slot) in said and all(slot != other for other, _ in clauses):
            later = (i for i, (other, _) in enumerate(clauses) if other and order.index(other) > order.index(slot))
            clauses.insert(next(later, len(clauses)), (slot, write_clause(slot, facts[slot])))
    return ", ".join(text for _, text in clauses) + "."


def thinned(critique: str, rng: np.random.Generator, *, dropped: float = DROPPED) -> str:
    """`critique` without a random share of its sentences.

    With every fault named, what is right to write would follow from the post alone, and a reviser taught so would not
    look at the critique.
    """
    return " ".join(sentence for sentence in sentences(critique) if rng.random() >= dropped)
