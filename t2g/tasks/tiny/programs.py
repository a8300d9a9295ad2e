"""The tiny world of code: verbal rules, programs of a few branches with planted faults, and tests.

Records have KodCode's format, so that the code task's feedback function and sandbox apply to them.

    question  red: add 2; blue: times 3; teal: minus 4.
    program   def f(k, n):
                  if k == "red":
                      return n + 2
                  if k == "blue":
                      return n * 5
                  return n
    fails     two tests of blue, which blame the second return, and two of teal, which blame no line

Tests check each rule at the values VISIBLE, and two keys without a rule. Held-out records also have `hidden_test`: the
rules at the values HIDDEN, and all other keys. A program that passes only the first tests violates the rules: it
compares n, as a share SPECIAL of the branches of references do, or has a branch for a key without a rule.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from t2g.config import WorldConfig
from t2g.sandbox import Outcome
from t2g.tasks.tiny.interpreter import interpret
from t2g.tasks.tiny.world import is_heldout
from t2g.types import Span

WORDS = ("red", "blue", "green", "black", "white", "pink", "teal", "gold")
OPERATORS = {"+": ("add", "plus"), "-": ("minus", "less"), "*": ("times", "by")}  # by wording
NUMBERS = range(2, 10)
NUM_RULES = (3, 4, 5)
VISIBLE = (2, 5)  # values of n
HIDDEN = (3, 8)
SPECIAL = 0.05
_OPERATOR_NAMES = "|".join(chain.from_iterable(OPERATORS.values()))
_RULE = re.compile(rf"(\w+)[:,] ({_OPERATOR_NAMES}) (\d+)")
_BRANCH = re.compile(r'if k == "(\w+)":\n\s*$')
HEAD = "def f(k, n):"
LAST = "\n    return n\n"


class Rule(NamedTuple):
    """The value that the program returns for a word: `n + 2` for red is ("red", "+", 2)."""

    word: str
    operator: str
    number: int

    def value(self, argument: int) -> int:
        if self.operator == "+":
            return argument + self.number
        if self.operator == "-":
            return argument - self.number
        return argument * self.number


class Case(NamedTuple):
    """A test: the value of f for a word and n."""

    word: str
    argument: int
    value: int


def sample_rules(rng: np.random.Generator, *, heldout: bool) -> list[Rule]:
    """Return rules of different keys, uniform over the split's combinations, which no seed shares with the other."""
    while True:
        keys = rng.permutation(WORDS)[: rng.choice(NUM_RULES)]
        rules = [_sample_rule(str(key), rng) for key in keys]
        if is_heldout(f"{rule}" for rule in sorted(rules)) == heldout:
            return rules


def make_question(rules: Iterable[Rule], wording: int) -> str:
    clauses = []
    sentences = []
    for rule in rules:
        operator = OPERATORS[rule.operator][wording]
        clauses.append(f"{rule.word}: {operator} {rule.number}")
        sentences.append(f"If {rule.word}, {operator} {rule.number}.")
    if wording == 0:
        return "; ".join(clauses) + "."
    return " ".join(sentences)


def make_program(
    rules: Iterable[Rule], rates: WorldConfig, rng: np.random.Generator, correct_words: Collection[str] = ()
) -> str:
    """Return a program with planted faults and at least one branch, in the order of the rules.

    The rules of `correct_words` have none.

    Probabilities per rule: `wrong`, another operator or another number, equally often; `missing`, no branch.
    Probabilities per program: `invented`, a branch of a word without a rule; `repeated`, a later copy of a branch.
    """
    rules = list(rules)
    branches: list[str] = []
    while not branches:
        for rule in rules:
            if rule.word not in correct_words:
                if rng.random() < rates.missing:
                    continue
                if rng.random() < rates.wrong:
                    rule = _change_rule(rule, rng)
            branches.append(_write_branch(rule, rng))
    if rng.random() < rates.repeated:
        source = int(rng.integers(len(branches)))
        position = int(rng.integers(source + 1, len(branches) + 1))
        branches.insert(position, branches[source])
    if rng.random() < rates.invented:
        word = str(rng.choice(_list_other_words(rules)))
        rule = _sample_rule(word, rng)
        position = int(rng.integers(len(branches) + 1))
        branches.insert(position, _write_branch(rule, rng))
    return HEAD + "".join(branches) + LAST


def _write_branch(rule: Rule, rng: np.random.Generator) -> str:
    value = f"n {rule.operator} {rule.number}"
    if rng.random() < SPECIAL:
        first, second = VISIBLE
        value = f"{rule.value(first)} if n == {first} else {rule.value(second)}"
    return f'\n    if k == "{rule.word}":\n        return {value}'


def _change_rule(rule: Rule, rng: np.random.Generator) -> Rule:
    if rng.random() < 0.5:
        operators = [other for other in OPERATORS if other != rule.operator]
        return rule._replace(operator=str(rng.choice(operators)))
    numbers = [other for other in NUMBERS if other != rule.number]
    return rule._replace(number=int(rng.choice(numbers)))


def _sample_rule(word: str, rng: np.random.Generator) -> Rule:
    operator = _sample_operator(rng)
    number = int(rng.choice(NUMBERS))
    return Rule(word, operator, number)


def _sample_operator(rng: np.random.Generator) -> str:
    return str(rng.choice(list(OPERATORS)))


def find_correction(question: str, response: str, span: Span) -> str | None:
    """Return the line that the rule of the branch needs, if the span is another line directly under its condition."""
    branch = _BRANCH.search(response[: span.start])
    if branch is None:
        return None
    symbols: dict[str, str] = {}
    for symbol, names in OPERATORS.items():
        symbols |= dict.fromkeys(names, symbol)
    lines: dict[str, str] = {}
    for word, name, number in _RULE.findall(question):
        lines[word] = f"return n {symbols[name]} {number}"
    line = lines.get(branch[1])
    if line == response[span.start : span.end]:
        return None
    return line


def _list_other_words(rules: Iterable[Rule]) -> list[str]:
    return sorted(set(WORDS) - {rule.word for rule in rules})


# ------------------------------------------------------------------------------------------------------ tests, records
def make_tests(cases: Iterable[Case]) -> str:
    """Return a pytest module with a test for each case."""
    module = "from solution import f\n"
    for word, argument, value in cases:
        module += f'\n\ndef test_{word}_{argument}():\n    assert f("{word}", {argument}) == {value}\n'
    return module


def make_records(*, count: int, heldout: bool, rates: WorldConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows in KodCode's format. `solution`, the base policy's target, has planted faults."""
    rng = np.random.default_rng([seed, int(heldout)])
    split = "heldout" if heldout else "train"
    for index in range(count):
        rules = sample_rules(rng, heldout=heldout)
        others = [str(word) for word in rng.permutation(_list_other_words(rules))]
        question = make_question(rules, int(rng.integers(2)))
        program = make_program(rules, rates, rng)
        row = {
            "question_id": f"tiny-code-{split}-{seed}-{index}",
            "question": question,
            "solution": program,
            "test": make_tests(_list_visible(rules, others)),
        }
        if heldout:
            row["hidden_test"] = make_tests(_list_hidden(rules, others))
        yield row


def make_repairs(rates: WorldConfig) -> Iterator[dict[str, Any]]:
    """Yield `rates.num_repairs` rows that continue a conversation: a faulty program, what fails of it, and another one.

    The rules that failed are written again, with the same probabilities of faults, and the others are right.
    """
    rng = np.random.default_rng([rates.seed, 2])
    number = 0
    while number < rates.num_repairs:
        rules = sample_rules(rng, heldout=False)
        question = make_question(rules, int(rng.integers(2)))
        program = make_program(rules, rates, rng)
        others = [str(word) for word in rng.permutation(_list_other_words(rules))]
        outcome = interpret(program, make_tests(_list_visible(rules, others)))
        if outcome is None or outcome.passed:
            continue
        number += 1
        words = {rule.word for rule in rules}
        passed = words.difference(find_failed_words(outcome))
        messages = [
            {"role": "assistant", "content": program},
            {"role": "user", "content": describe_failures(outcome)},
        ]
        repaired = make_program(rules, rates, rng, passed)
        yield {
            "question_id": f"tiny-code-repair-{rates.seed}-{number}",
            "question": question,
            "messages": messages,
            "solution": repaired,
        }


def find_failed_words(outcome: Outcome) -> list[str]:
    """Return the words whose tests fail, in order; none where the program does not compile."""
    words = dict[str, None]()
    for test in outcome.tests:
        name = test.name.split("_")
        if not test.passed and len(name) == 3:
            words[name[1]] = None
    return list(words)


def describe_failures(outcome: Outcome) -> str:
    """Return a message of a few tokens: "red fails. teal fails."."""
    failures = [f"{word} fails." for word in find_failed_words(outcome)]
    if failures:
        return " ".join(failures)
    return "All pass." if outcome.passed else "Syntax."


def _list_visible(rules: Iterable[Rule], others: Iterable[str]) -> list[Case]:
    """Return the cases of the visible tests."""
    cases = _list_cases(rules, VISIBLE)
    for word, argument in zip(others, VISIBLE, strict=False):
        cases.append(Case(word, argument, argument))
    return cases


def _list_hidden(rules: Iterable[Rule], others: Sequence[str]) -> list[Case]:
    """Return the cases of the hidden tests."""
    cases = _list_cases(rules, HIDDEN)
    argument = HIDDEN[0]
    for word in others[len(VISIBLE) :]:
        cases.append(Case(word, argument, argument))
    return cases


def _list_cases(rules: Iterable[Rule], values: Iterable[int]) -> list[Case]:
    """Return the cases of each rule at these values of n."""
    return [Case(rule.word, argument, rule.value(argument)) for rule, argument in product(rules, values)]


def tokenizer_pieces(instruction: str) -> list[str]:
    """Return the pieces of the policy's tokenizer, as `world.tokenizer_pieces`.

    A rule's operator is one token with the comma or colon before it: a small model learns to look at the next token.
    """
    pieces = list(WORDS)
    for with_colon, with_comma in OPERATORS.values():
        pieces += [f": {with_colon}", f", {with_comma}"]
    for word in ("If", "return", "n", "if", *WORDS, *OPERATORS, *NUMBERS):
        pieces.append(f" {word}")
    phrases = [HEAD, LAST, '\n    if k == "', '":\n        return', " n", " if n ==", " else", instruction]
    return pieces * 20 + phrases * 2
