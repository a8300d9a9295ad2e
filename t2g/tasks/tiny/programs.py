"""The tiny world of code: rules in words, programs of a few branches with planted faults, and the tests that decide.

Records are KodCode's, so that the feedback function of the code task and its sandbox take them as they are.

    question  red: add 2; blue: times 3; teal: minus 4.
    program   def f(k, n):
                  if k == "red":
                      return n + 2
                  if k == "blue":
                      return n * 5
                  return n
    fails     two tests of blue, which the second return is blamed for, and two of teal, which no line is

Tests ask for each rule at SHOWN, and for two words that no rule has. Held-out records have `hidden_test` besides: the
rules at HIDDEN, and all other words. A program that passes the first alone is right by the tests and not by the rules:
one that looks at n, which SPECIAL of the branches of references do, or has a branch for a word that is not asked for.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from t2g.config import WorldConfig
from t2g.tasks.tiny.world import is_heldout

WORDS = ("red", "blue", "green", "black", "white", "pink", "teal", "gold")
OPERATORS = {"+": ("add", "plus"), "-": ("minus", "less"), "*": ("times", "by")}  # in the two wordings
NUMBERS = range(2, 10)
NUM_RULES = (3, 4, 5)
SHOWN, HIDDEN = (2, 5), (3, 8)  # values of n
SPECIAL = 0.05
HEAD, LAST = "def f(k, n):", "\n    return n\n"
IMPORT = "from solution import f\n"


class Rule(NamedTuple):
    """What the program returns for a word: `n + 2` is ("red", "+", 2)."""

    word: str
    operator: str
    number: int

    def value(self, n: int) -> int:
        return {"+": n + self.number, "-": n - self.number, "*": n * self.number}[self.operator]


def sample_rules(rng: np.random.Generator, *, heldout: bool) -> list[Rule]:
    """Rules of different words, uniform over the combinations of the split; no held-out one is in any training set."""
    while True:
        words = rng.permutation(WORDS)[: rng.choice(NUM_RULES)]
        rules = [Rule(str(word), _operator(rng), int(rng.choice(NUMBERS))) for word in words]
        if is_heldout(f"{rule}" for rule in sorted(rules)) == heldout:
            return rules


def write_question(rules: Iterable[Rule], wording: int) -> str:
    said = [(rule.word, OPERATORS[rule.operator][wording], rule.number) for rule in rules]
    if wording == 0:
        return "; ".join(f"{word}: {operator} {number}" for word, operator, number in said) + "."
    return " ".join(f"If {word}, {operator} {number}." for word, operator, number in said)


def write_program(rules: Iterable[Rule], rates: WorldConfig, rng: np.random.Generator) -> str:
    """A program with planted faults, at least one branch long, in the order of the rules.

    `wrong` and `missing` are probabilities of each rule: another operator or another number, each as often; no branch.
    `invented` and `repeated` are of each program: a branch of a word without a rule, anywhere; a branch again, later.
    """
    rules, branches = list(rules), list[str]()
    while not branches:
        for rule in rules:
            if rng.random() >= rates.missing:
                branches.append(_branch(_wrong(rule, rng) if rng.random() < rates.wrong else rule, rng))
    if rng.random() < rates.repeated:
        source = int(rng.integers(len(branches)))
        branches.insert(int(rng.integers(source + 1, len(branches) + 1)), branches[source])
    if rng.random() < rates.invented:
        rule = Rule(str(rng.choice(_others(rules))), _operator(rng), int(rng.choice(NUMBERS)))
        branches.insert(int(rng.integers(len(branches) + 1)), _branch(rule, rng))
    return HEAD + "".join(branches) + LAST


def _branch(rule: Rule, rng: np.random.Generator) -> str:
    if rng.random() < SPECIAL:
        one, other = map(rule.value, SHOWN)
        return _text(rule.word, f"{one} if n == {SHOWN[0]} else {other}")
    return _text(rule.word, f"n {rule.operator} {rule.number}")


def _text(word: str, value: str) -> str:
    return f'\n    if k == "{word}":\n        return {value}'


def _wrong(rule: Rule, rng: np.random.Generator) -> Rule:
    if rng.random() < 0.5:
        return rule._replace(operator=str(rng.choice([other for other in OPERATORS if other != rule.operator])))
    return rule._replace(number=int(rng.choice([other for other in NUMBERS if other != rule.number])))


def _operator(rng: np.random.Generator) -> str:
    return str(rng.choice(list(OPERATORS)))


def _others(rules: Iterable[Rule]) -> list[str]:
    return sorted(set(WORDS) - {rule.word for rule in rules})


# ------------------------------------------------------------------------------------------------------ tests, records
def write_tests(cases: Iterable[tuple[str, int, int]]) -> str:
    """A pytest module. cases: word, n, and what f returns for them."""
    return IMPORT + "".join(
        f'\n\ndef test_{word}_{n}():\n    assert f("{word}", {n}) == {value}\n' for word, n, value in cases
    )


def make_records(*, count: int, heldout: bool, rates: WorldConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Rows in KodCode's format. `solution` has planted faults: it is what the base policy learns."""
    rng = np.random.default_rng([seed, int(heldout)])
    split = "heldout" if heldout else "train"
    for index in range(count):
        rules = sample_rules(rng, heldout=heldout)
        others = [str(word) for word in rng.permutation(_others(rules))]
        shown = [(rule.word, n, rule.value(n)) for rule in rules for n in SHOWN]
        shown += [(word, n, n) for word, n in zip(others, SHOWN, strict=False)]
        hidden = [(rule.word, n, rule.value(n)) for rule in rules for n in HIDDEN]
        hidden += [(word, HIDDEN[0], HIDDEN[0]) for word in others[len(SHOWN) :]]
        yield {
            "question_id": f"tiny-code-{split}-{seed}-{index}",
            "question": write_question(rules, int(rng.integers(2))),
            "solution": write_program(rules, rates, rng),
            "test": write_tests(shown),
        } | ({"hidden_test": write_tests(hidden)} if heldout else {})


def tokenizer_pieces(instruction: str) -> list[str]:
    """See `world.tokenizer_pieces`. Words come more often than phrases, so that their merges rank first; what follows a
    word of a rule, with its comma or colon, is one token: the next token is what a small model learns to look for.
    """
    said = [f"{stop} {wordings[way]}" for wordings in OPERATORS.values() for way, stop in enumerate(":,")]
    words = [*WORDS, *said, *(f" {word}" for word in ("If", "return", "n", "if", *WORDS, *OPERATORS, *NUMBERS))]
    return (
        words * 20 + [HEAD, LAST, '\n    if k == "', '":\n        return', " n", " if n ==", " else", instruction] * 2
    )
