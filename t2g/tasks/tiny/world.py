"""The built-in tiny world: posts that state K facts, summaries with planted faults, a feedback function and a measure.

The task can be learnt from random weights in minutes on two cores. Records have the SLF5K format, so that they pass
through the code of real data. The world is not a benchmark.

    facts    {"name": "José", "thing": "phone", "fault": "hums", "day": "Monday", "place": "Oslo"}
    post     I bought a phone. My name is José. It always hums. I live in Oslo. It began on Monday.
    summary  by José, about a laptop, it hums, since Monday.
    critique The name is José, it says José: right. The thing is phone, it says laptop: wrong. [...]
             The place is missing.
    good     José, hums, Monday        poor  laptop

K is `world.num_facts`, from 5 to 20: a record's `facts` are the first K slots.

The feedback function and the measure both read the facts. The measure does not read the critique.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from t2g.config import WorldConfig
from t2g.types import Span

_FACTS = {  # slot -> lead of its clause, how posts begin to state it, values
    "name": ("by", ("My name is", "I am"), "José Zoë 美咲 Mira Otto Nadia Ivan Lena"),
    "thing": ("about a", ("I bought a", "This is about my"), "phone laptop kettle 🎧 bike camera printer lamp"),
    "fault": ("it", ("It always", "Every hour it"), "hums leaks overheats flickers rattles freezes smokes squeaks"),
    "day": ("since", ("It began on", "I noticed it on"),
            "Monday Tuesday Wednesday Thursday Friday Saturday Sunday Easter"),
    "place": ("in", ("I live in", "I write from"), "東京 Zürich Málaga Oslo Lima Paris Quito Cairo"),
    "colour": ("painted", ("Its colour is", "I chose it in"), "teal blue green black white brown purple yellow"),
    "price": ("for", ("It cost", "The bill says"), "20 30 40 50 60 70 80 90"),
    "shop": ("from", ("I got it at", "The shop was"), "Acme Globex Initech Hooli Umbra Vandelay Wonka Soylent"),
    "month": ("delivered in", ("It came in", "The invoice is of"), "January February March April May June July August"),
    "owner": ("shared with my", ("I share it with my", "I lend it my"), "aunt uncle sister mother father niece boss"),
    "room": ("kept in the", ("It stands in the", "It is in the"), "kitchen cellar attic garage hall den porch shed"),
    "size": ("sized", ("Its size is", "They call it"), "tiny small medium large huge narrow tall wide"),
    "part": ("with a broken", ("What broke is the", "I glued the"), "hinge screen cable button wheel handle lid cap"),
    "smell": ("smelling of", ("It smells of", "It gives off"), "rubber soap vinegar petrol mint onion cheese coffee"),
    "hour": ("at", ("It happens at", "I hear it at"), "noon midnight dawn dusk breakfast lunch dinner bedtime"),
    "trade": ("written by a", ("I work as a", "My trade is"), "baker farmer nurse pilot tailor teacher welder waiter"),
    "pet": ("scaring a", ("It scares my", "At home waits my"), "cat dog parrot rabbit turtle hamster goldfish pony"),
    "wish": ("asking for a", ("I want a", "Please send a"), "refund repair voucher apology discount manual visit call"),
    "week": ("after week", ("It failed in week", "It was fine until week"), "11 12 13 14 15 16 17 18"),
    "contact": ("reached by", ("Reach me by", "I answer by"), "letter pager fax radio text email courier pigeon"),
}  # fmt: skip
CLAUSE_LEADS: dict[str, str] = {}
POST_TEMPLATES: dict[str, tuple[str, ...]] = {}
SLOTS: dict[str, tuple[str, ...]] = {}
for _slot, (_lead, _openings, _values) in _FACTS.items():
    CLAUSE_LEADS[_slot] = _lead
    POST_TEMPLATES[_slot] = tuple(f"{opening} {{}}." for opening in _openings)
    SLOTS[_slot] = tuple(_values.split())
INVENTIONS = ("sells honey", "likes opera", "plays chess", "hates rain", "met a wizard", "saw a ghost")
MISSING = "The {} is missing."
POLICY_INSTRUCTION = "Summarise: "
FEEDBACK_INSTRUCTION = "Judge the summary. Post: "
# By (critique, labels). The tokenizers are trained on the first only; the demo's results depend on them.
FEEDBACK_INSTRUCTIONS = {
    (True, "sparse"): FEEDBACK_INSTRUCTION,
    (True, "dense"): "Judge every clause. Post: ",
    (False, "sparse"): "Quote from the summary. Post: ",
    (False, "dense"): "Quote every clause. Post: ",
}
FEEDBACK_SUMMARY_HEADER = "\nSummary: "
# Rates of planted faults. An improving policy still repeats and invents. A reward model that has read few such faults
# praises them, and training makes praised faults more frequent.
PLANTED = WorldConfig(wrong=0.15, missing=0.15, invented=0.5, repeated=0.5)
HELDOUT_ONE_IN = 8  # one in so many combinations of facts is reserved for held-out posts

Facts = Mapping[str, str]


class SummaryJudgement(NamedTuple):
    """Critique and spans of one response."""

    critique: str
    good: list[Span]
    poor: list[Span]


class Clause(NamedTuple):
    """One clause of a response: its half-open character range, its slot (None: no slot) and the start of its value."""

    start: int
    end: int
    slot: str | None
    value_start: int


class Finding(NamedTuple):
    """The verdict on one clause, and its sentence in the critique."""

    clause: Clause
    verdict: str  # right, wrong, repeated or invented
    sentence: str


# ------------------------------------------------------------------------------------------------ posts and summaries
def sample_facts(rng: np.random.Generator, *, heldout: bool, num_facts: int = 5) -> dict[str, str]:
    """Return one value for each of the first slots, uniform over the split's combinations.

    The split is a hash of the facts without a seed: no held-out post shares its facts with a training post of any seed.
    """
    while True:
        facts: dict[str, str] = {}
        for slot in first_slots(num_facts):
            values = SLOTS[slot]
            facts[slot] = values[rng.integers(len(values))]
        if is_heldout(facts.values()) == heldout:
            return facts


def is_heldout(parts: Iterable[str]) -> bool:
    """Return whether a combination belongs to the held-out split, of every world and seed."""
    digest = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest) % HELDOUT_ONE_IN == 0


def first_slots(num_facts: int) -> tuple[str, ...]:
    """Return the slots of a world of `num_facts` facts."""
    return tuple(SLOTS)[:num_facts]


def make_post(facts: Facts, rng: np.random.Generator) -> str:
    """Return the facts as template sentences in random order."""
    sentences = []
    for slot, fact in facts.items():
        templates = POST_TEMPLATES[slot]
        template = templates[rng.integers(len(templates))]
        sentences.append(template.format(fact))
    return " ".join(sentences[index] for index in rng.permutation(len(sentences)))


def make_clause(slot: str, value: str) -> str:
    """Return one clause of a summary: `make_clause("thing", "phone") == "about a phone"`."""
    return f"{CLAUSE_LEADS[slot]} {value}"


def ideal_summary(facts: Facts) -> str:
    """Return the summary with every fact right, in the order of the slots."""
    clauses = [make_clause(slot, fact) for slot, fact in facts.items()]
    return ", ".join(clauses) + "."


def make_summary(facts: Facts, rates: WorldConfig, rng: np.random.Generator) -> str:
    """Return a summary with planted faults and at least one clause, in the order of the slots.

    Probabilities per fact: `missing`, and `wrong` of the others: a value uniform over the slot's seven others.
    Probabilities per summary: `invented`, one clause about nothing in the post, anywhere; `repeated`, one clause again,
    anywhere after the first.
    """
    clauses: list[str] = []
    while not clauses:
        for slot, value in facts.items():
            if rng.random() < rates.missing:
                continue
            if rng.random() < rates.wrong:
                others = [other for other in SLOTS[slot] if other != value]
                value = others[rng.integers(len(others))]
            clauses.append(make_clause(slot, value))
    if rng.random() < rates.repeated:
        source = int(rng.integers(len(clauses)))
        position = int(rng.integers(source + 1, len(clauses) + 1))
        clauses.insert(position, clauses[source])
    if rng.random() < rates.invented:
        position = int(rng.integers(len(clauses) + 1))
        invention = INVENTIONS[rng.integers(len(INVENTIONS))]
        clauses.insert(position, invention)
    return ", ".join(clauses) + "."


# ---------------------------------------------------------------------------------------------------- feedback, measure
_SLOT_OF_LEAD = {lead: slot for slot, lead in CLAUSE_LEADS.items()}
_CLAUSE = re.compile(r"[^,.;\s](?:[^,.;\n]*[^,.;\s])?")


@lru_cache
def _make_lead_pattern(num_facts: int) -> re.Pattern[str]:
    leads = [CLAUSE_LEADS[slot] for slot in first_slots(num_facts)]
    leads.sort(key=len, reverse=True)
    alternatives = "|".join(map(re.escape, leads))
    return re.compile(rf"({alternatives})\s+(?=\S)")


def split_clauses(response: str, num_facts: int = 5) -> list[Clause]:
    """Return the clauses of any text, in order: the non-blank stretches between `,`, `.`, `;` and line ends.

    `split_clauses("by Zoë, la la.") == [Clause(0, 6, "name", 3), Clause(8, 13, None, 8)]`
    """
    clauses = []
    for match in _CLAUSE.finditer(response):
        start, end = match.span()
        lead = _make_lead_pattern(num_facts).match(response, start, end)
        if lead is None:
            clauses.append(Clause(start, end, None, start))
        else:
            slot = _SLOT_OF_LEAD[lead.group(1)]
            clauses.append(Clause(start, end, slot, lead.end()))
    return clauses


def judge_clauses(facts: Facts, response: str) -> list[Finding]:
    """Return verdict and sentence of each clause, in order. KeyError if the facts lack a slot."""
    if missing := set(first_slots(len(facts))) - set(facts):
        raise KeyError(min(missing))
    findings = []
    right: set[str] = set()
    for clause in split_clauses(response, len(facts)):
        text = response[clause.value_start : clause.end]
        if clause.slot is None:
            findings.append(Finding(clause, "invented", f"It says {text}: invented."))
            continue
        fact = facts[clause.slot]
        if text != fact:
            verdict = "wrong"
        elif clause.slot in right:
            verdict = "repeated"
        else:
            verdict = "right"
            right.add(clause.slot)
        sentence = f"The {clause.slot} is {fact}, it says {text}: {verdict}."
        findings.append(Finding(clause, verdict, sentence))
    return findings


def judge_summary(facts: Facts, response: str, *, dense: bool = False) -> SummaryJudgement:
    """Return the critique of any response, with evidence before verdicts, and its good and poor spans.

    The value of a clause is good if it is right and new, poor if it is wrong or repeated. A clause about nothing in the
    post is poor as a whole. A missing fact is part of the critique and has no span. A wrong value has the fact as its
    fix, unless another clause states it. Other faults have no fix: a separator outside of the span would remain.

    Args:
        dense: Make every clause a span as a whole, with the label of its value; the critique is the same.

    Raises:
        KeyError: The facts lack a slot.
    """
    good: list[Span] = []
    poor: list[Span] = []
    findings = judge_clauses(facts, response)
    unstated = set(facts) - {clause.slot for clause, verdict, _ in findings if verdict == "right"}
    position = 0
    for clause, verdict, sentence in findings:
        start = clause.start if dense else clause.value_start
        label: Literal[-1, 1] = 1 if verdict == "right" else -1
        about = (position, position + len(sentence))
        fix = None
        if verdict == "wrong" and clause.slot in unstated:
            unstated.remove(clause.slot)
            fix = response[start : clause.value_start] + facts[clause.slot]
        span = Span(start=start, end=clause.end, label=label, critique_range=about, fix=fix)
        (good if label == 1 else poor).append(span)
        position += len(sentence) + 1
    stated = {clause.slot for clause, _, _ in findings}
    sentences = [sentence for _, _, sentence in findings]
    sentences += [MISSING.format(slot) for slot in facts if slot not in stated]
    return SummaryJudgement(" ".join(sentences), good, poor)


def measure(facts: Facts, response: str) -> dict[str, float]:
    """Return the measures of a response, from the facts alone.

    With c clauses, k distinct facts stated right and n facts: fact_precision k / c (0 without a clause), fact_recall
    k / n, fact_f1 = 2k / (c + n). Wrong, invented and repeated clauses all lower precision. `repeated` counts right
    clauses beyond the first of their fact; `wrong` and `invented` count clauses, `length` counts characters.
    """
    counts = Counter(verdict for _, verdict, _ in judge_clauses(facts, response))
    num_right = counts["right"]
    num_clauses = counts.total()
    precision = num_right / num_clauses if num_clauses else 0.0
    recall = num_right / len(facts)
    f1 = 2 * num_right / (num_clauses + len(facts))
    faults = {verdict: float(counts[verdict]) for verdict in ("repeated", "wrong", "invented")}
    return {
        "fact_precision": precision,
        "fact_recall": recall,
        "fact_f1": f1,
        **faults,
        "clauses": float(num_clauses),
        "length": float(len(response)),
    }


# -------------------------------------------------------------------------------------------------------------- records
def make_records(*, count: int, heldout: bool, rates: WorldConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows in the SLF5K hub format, with the extra key `facts`.

    `tldr_human_reference_summary` is the base policy's target, with planted faults. `ideal_human_summary` states every
    fact. `generated_summary_for_feedback` is another faulty draw, and `feedback` its critique.
    """
    rng = np.random.default_rng([seed, int(heldout)])
    split = "heldout" if heldout else "train"
    for index in range(count):
        facts = sample_facts(rng, heldout=heldout, num_facts=rates.num_facts)
        post = make_post(facts, rng)
        reference = make_summary(facts, rates, rng)
        generated = make_summary(facts, rates, rng)
        critique = judge_summary(facts, generated).critique
        title = f"A {facts['thing']} that {facts['fault']}"
        yield {
            "id": f"tiny-{split}-{seed}-{index}",
            "subreddit": "tiny",
            "title": title,
            "post": post,
            "tldr_human_reference_summary": reference,
            "ideal_human_summary": ideal_summary(facts),
            "generated_summary_for_feedback": generated,
            "feedback": critique,
            "facts": facts,
        }


def write_world(
    folder: Path, world: WorldConfig, make: Callable[..., Iterable[dict[str, Any]]] = make_records
) -> dict[str, Path]:
    """Write `train.jsonl` and `heldout.jsonl` into `folder` and return their paths by split. make: yields the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for split, count in (("train", world.num_train), ("heldout", world.num_heldout)):
        paths[split] = folder / f"{split}.jsonl"
        rows = make(count=count, heldout=split == "heldout", rates=world, seed=world.seed)
        write_rows(paths[split], rows)
    return paths


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def tokenizer_pieces(*, reward: bool, num_facts: int = 5) -> list[str]:
    """Return the strings that a tokenizer is trained on. BPE learns merges inside a piece only.

    A single word is far more frequent than a phrase: its merges rank first, and merges of a phrase join complete ones.
    Values outside ASCII are left out and stay several tokens long, like a rare word under a real tokenizer.
    """
    slots = first_slots(num_facts)
    leads = [CLAUSE_LEADS[slot] for slot in slots]
    templates = chain.from_iterable(POST_TEMPLATES[slot] for slot in slots)
    phrases = [template.removesuffix(" {}.") for template in templates]
    phrases += [f". {phrase}" for phrase in phrases]
    for lead in (*leads, *INVENTIONS):
        phrases += [lead, f", {lead}"]
    if reward:
        phrases += [FEEDBACK_INSTRUCTION.rstrip(), FEEDBACK_SUMMARY_HEADER.rstrip(), ", it says", "It says", " It says"]
        phrases += [f" {lead}" for lead in leads]
        for slot in slots:
            phrases += [f"The {slot} is", f" The {slot} is"]
        phrases += [": right.", ": wrong.", ": repeated.", ": invented.", " missing."]
        phrases += [
            '{"critique": "', '", "good": ["', '", "good": []', '", "', '"], "poor": ["', '"]}', ', "poor": []}',
            '"], "poor": []}', ', "poor": ["', '{"quote": "', '", "occurrence": ', '"]',
        ]  # fmt: skip
    else:
        phrases.append(POLICY_INSTRUCTION.rstrip())
    vocabulary: list[str] = []
    for phrase in phrases:
        vocabulary += re.findall(r" ?\w+|[^\w\s]", phrase)
    for value in chain.from_iterable(SLOTS[slot] for slot in slots):
        if value.isascii():
            vocabulary.append(f" {value}")
            if reward:
                vocabulary.append(value)
    return sorted(set(vocabulary)) * 50 + phrases * 2
