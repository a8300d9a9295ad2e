"""READMEs and guides: their length, their links, the keys and metrics that they name, and their commands."""

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import make_metrics_reference
import pytest
from make_config_reference import JOBS, MEANINGS, TARGET, format_reference, format_table, list_sections
from models import random_model

from t2g.config import AlarmConfig, CompareJob
from t2g.config.base_jobs import JobConfig
from t2g.config.validation_errors import list_fields
from t2g.metrics import CHOICES, METRICS, find_metric
from t2g.tasks.base import TASKS, get_task

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "t2g" / "guides").glob("[0-9]*.md"))
MAX_PARAGRAPH = 80  # words
MAX_GUIDE = 1000
MAX_WORDS = {  # of `wc -w`: tables and code count
    "README.md": 1400,
    "t2g/README.md": 1900,
    "actors/README.md": 1900,
    "docker/README.md": 1600,
    "t2g/guides/02-your-feedback.md": 1600,
    "t2g/guides/13-conversations.md": 1400,
    "t2g/guides/15-measure-and-compare.md": 1300,
    "t2g/sandbox/README.md": 2000,
    "t2g/study/README.md": 5900,
}
UNLIMITED = ("configs/README.md", "jobs/benchmark_phases/README.md", "tests/README.md")  # tables
NEWCOMER = [ROOT / "README.md", *GUIDES]
DOCUMENTS = [*NEWCOMER, *(ROOT / name for name in (*MAX_WORDS, *UNLIMITED) if (ROOT / name) not in NEWCOMER)]
OLD_TERMS = (  # of the names that this project gave to things, left sides of the style guide's dictionary
    "arena", "at rest", "asleep", "bell", "colocat", "crew", "door sign", "in turn", "invitation", "never run", "seam",
    "the floor", "who is late", "in vain",
)  # fmt: skip
# in the comment above a block
SKIP = "not run:"
DRY_RUN = "dry run:"
FILE = "file: "
TIMEOUT_S = 900


class Block(NamedTuple):
    """A fenced block with its language and the HTML comment above it."""

    note: str
    language: str
    text: str


@cache
def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def find_blocks(text: str) -> list[Block]:
    """Return the fenced blocks in order."""
    pattern = r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$"
    return [Block(*match) for match in re.findall(pattern, text, re.MULTILINE | re.DOTALL)]


def find_paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and list items; code, tables, headings and comments are none."""
    prose = re.sub(r"^```.*?^```$|^<!--.*?-->$|^[|#][^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in prose.split("\n\n"):
        yield from re.split(r"\n(?=(?:[-*]|\d+\.) )", block.strip())


def find_spans(text: str) -> list[str]:
    """Return what stands in backquotes outside blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchor(heading: str) -> str:
    """Return the anchor that a forge gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_blocks_paragraphs_and_anchors_are_found() -> None:
    text = "# A `b` c\n\nOne\ntwo.\n- three\n- four\n\n| x |\n\n<!-- dry run: long -->\n"
    text += "```\nmake x\n```\n\n```python\ny\n```\n"
    assert find_blocks(text) == [Block("dry run: long", "", "make x\n"), Block("", "python", "y\n")]
    assert [p for p in find_paragraphs(text) if p] == ["One\ntwo.", "- three", "- four"]
    assert anchor("A `b`, c!") == "a-b-c"


@pytest.mark.parametrize("file", [file for file in DOCUMENTS if name_of(file) not in UNLIMITED], ids=name_of)
def test_a_document_keeps_its_word_limit(file: Path) -> None:
    assert len(read(file).split()) <= MAX_WORDS.get(name_of(file), MAX_GUIDE)


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_paragraphs_are_short(file: Path) -> None:
    assert [text for text in find_paragraphs(read(file)) if len(text.split()) > MAX_PARAGRAPH] == []


def find_documents() -> list[Path]:
    """Return every Markdown file of the repository; templates with placeholders are none."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists() and "model_card" not in name]


def broken_links(file: Path) -> Iterator[str]:
    """Yield the relative links of a file whose target, or heading in it, does not exist."""
    for link in re.findall(r"\]\(([^)\s]+)\)", read(file)):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (file.parent / path) if path else file
        headings = re.findall(r"^#+ (.*)$", read(target), re.MULTILINE) if heading and target.exists() else []
        if not target.exists() or (heading and heading not in map(anchor, headings)):
            yield link


def test_relative_links_resolve() -> None:
    broken = {name_of(file): links for file in find_documents() if (links := list(broken_links(file)))}
    assert broken == {}


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_files_in_a_document_exist(file: Path) -> None:
    """Those of the repository that stand in backquotes; of `folder/{a,b}.py` and `folder/*.py` the folder."""
    cited = [re.split(r"[{*]", span)[0] for span in find_spans(read(file)) if re.match(r"[\w.-]+/[\w./{*-]", span)]
    tops = {"t2g", "actors", "jobs", "docker", "tests"}
    assert [name for name in cited if name.partition("/")[0] in tops and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["t2g/README.md", "actors/README.md"])
def test_the_way_into_the_code_names_what_is_there(name: str) -> None:
    """A file and a function of a table: the file defines it. Paths are of the README's folder or of the root."""
    file = ROOT / name
    pairs = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", read(file))
    missing = []
    for path, function in pairs:
        code = ROOT / path if (ROOT / path).exists() else file.parent / path
        last_name = function.rpartition(".")[2]
        if not re.search(rf"\b(?:def|class) {last_name}\b", read(code)):
            missing.append(f"{path}: {function}")
    assert len(pairs) >= 5
    assert missing == []


def test_guides_use_the_terms_of_the_field() -> None:
    """In prose: a key that still has an old name is cited by it, in backquotes."""
    pattern = rf"\b(?:{'|'.join(OLD_TERMS)})\w*"
    code = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
    prose = {file: code.sub("", read(file)) for file in NEWCOMER}
    assert {name_of(file): terms for file, text in prose.items() if (terms := re.findall(pattern, text))} == {}


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_config_keys_in_a_document_exist(file: Path) -> None:
    """`section.key`, `section.key=value`: the section is one of a job, so the key must be one as well."""
    known = {key for job in JOBS for key in list_fields(job)}
    sections = {key.partition(".")[0] for key in known if "." in key}
    cited = [re.match(r"[a-z_]+(?:\.[a-z_]+)+(?=$|[=\s])", span) for span in find_spans(read(file))]
    shell = [word for block in find_blocks(read(file)) for word in re.findall(r"(?<=\s)[a-z_.]+(?==)", block.text)]
    keys = {match.group() for match in cited if match} | {word for word in shell if "." in word}
    assert {key for key in keys if key.partition(".")[0] in sections and not is_known(key, known)} == set()


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_keys_whose_values_a_shell_would_split_are_quoted(file: Path) -> None:
    """`'learner.lora={r: 16}'`: without quotes a shell splits it at the space, and zsh expands brackets."""
    last = {key.rpartition(".")[2] for job in JOBS for key in list_fields(job)}
    shell = "\n".join(block.text for block in find_blocks(read(file)) if not block.language)
    texts = [*find_spans(read(file)), shell]
    pattern = r"(?<![\w.])('?)([a-z_]+(?:\.[a-z_]+)*)=(?=[\[{])(?!\{[a-z]+\})"  # {name} is a placeholder
    pairs = [pair for text in texts for pair in re.findall(pattern, text)]
    assert [key for quote, key in pairs if not quote and key.rpartition(".")[2] in last] == []


def is_known(key: str, known: set[str]) -> bool:
    """Whether a key exists; below a mapping, such as policies, any name does, and files share names of sections."""
    parents = {".".join(key.split(".")[:length]) for length in range(1, key.count(".") + 1)}
    is_file = key.rpartition(".")[2] in ("jsonl", "json", "yaml", "log", "html", "py", "csv", "md")
    return key in known or is_file or bool(parents & {"policies", "endpoints", "judges"})


@pytest.mark.parametrize("file", GUIDES, ids=name_of)
def test_metrics_in_a_guide_are_registered(file: Path) -> None:
    groups = {name.partition("/")[0] for name in METRICS if "/" in name}.union(*CHOICES.values())
    cited = [span for span in find_spans(read(file)) if re.fullmatch(r"[a-z]+/[a-z_0-9]+", span)]
    metrics = {name for name in cited if name.partition("/")[0] in groups}
    assert {name for name in metrics if find_metric(name) is None} == set()


def test_units_in_the_guide_to_a_run_are_those_of_the_registry() -> None:
    """A unit stands in brackets behind its metric in the first column of a table."""
    (guide,) = (file for file in GUIDES if "read-a-run" in file.name)
    units = re.findall(r"^\| `([a-z]+/[a-z_]+)` \(([^)]+)\) \|", read(guide), re.MULTILINE)
    assert len(units) >= 3
    for name, unit in units:
        metric = find_metric(name)
        assert metric is not None and metric.unit == unit


def test_bounds_of_alarms_in_the_guide_to_a_run_are_the_defaults() -> None:
    (guide,) = (file for file in GUIDES if "read-a-run" in file.name)
    bounds = re.findall(r"`alarms\.([a-z_]+)=([\d.]+)`", read(guide))
    assert len(bounds) > 5
    defaults = AlarmConfig()
    assert {key: float(value) for key, value in bounds} == {key: getattr(defaults, key) for key, _ in bounds}


@cache
def read_code() -> str:
    files = [path for name in ("t2g", "actors", "jobs", "docker", "tests") for path in (ROOT / name).rglob("*.py")]
    return "\n".join(map(read, files))


def test_names_in_the_guide_to_extensions_are_those_of_the_code() -> None:
    (guide,) = (file for file in GUIDES if "extend" in file.name)
    names = [span for span in find_spans(read(guide)) if re.fullmatch(r"_?[A-Z][A-Za-z_]+|[a-z]+_[a-z_]+", span)]
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"\b{name}\b", read_code())] == []


def test_the_table_of_tasks_has_each_with_its_measure() -> None:
    section = read(ROOT / "t2g/README.md").partition("## Tasks\n")[2]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    for name in TASKS:
        (cells,) = (row for row in rows if f"`{name}`" in row[1])
        measure = get_task(name).score_name
        assert (f"`{measure}`" if measure else "none") in cells[3]
        assert name in JobConfig.model_fields["task"].description


def test_messages_in_the_troubleshooting_guide_are_those_of_the_code() -> None:
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", read_code())  # literals over several lines
    (guide,) = (file for file in GUIDES if "troubleshooting" in file.name)
    quoted = re.findall(r'^\| ("[^|]+")', read(guide), re.MULTILINE)
    messages = [message for cell in quoted for message in re.findall(r'"([^"]+)"', cell)]
    assert len(messages) > 20
    assert [message for message in messages if message not in source] == []


# ------------------------------------------------------------------------------------------------ the config reference
def test_the_config_reference_is_current() -> None:
    assert read(TARGET) == format_reference(), "run: make docs"


def test_a_job_that_extends_another_documents_what_it_adds() -> None:
    table = format_table(CompareJob)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == ["run", "compare"]
    assert "every key of [t2g train](#t2g-train)" in table


def test_the_metrics_reference_is_current() -> None:
    """So every registered metric is documented."""
    assert read(make_metrics_reference.TARGET) == make_metrics_reference.format_reference(), "run: make docs"


def test_no_meaning_is_given_twice() -> None:
    """MEANINGS is for keys without a description in the schema; one that has got its own is taken out."""
    blank = {
        (section.__name__, name)
        for section in [*JOBS, *list_sections()]
        for name, info in section.model_fields.items()
        if not info.description
    }
    names = blank | {name for _, name in blank}
    assert {key for key in MEANINGS if key not in names} == set()


# ----------------------------------------------------------------------------------------------- commands, run for real
def make_script(text: str, folder: Path) -> str:
    """Return a shell script of a document's blocks: Python and data are written, commands run or are tried dry.

    A block becomes a file where its comment, `file: NAME`, or a comment in its first line names one. FOLDER is a model.
    """
    lines = ["set -eu"]
    for block in find_blocks(text):
        name = re.match(r"# ([\w/-]+\.py)\n", block.text) or re.match(rf"{FILE}(.+)", block.note)
        if block.note.startswith(SKIP):
            continue
        if name:
            lines += [f"cat > {name.group(1)} <<'END_OF_FILE'", block.text.rstrip("\n"), "END_OF_FILE"]
        elif not block.language:
            commands = block.text.replace("\\\n", " ").splitlines()
            is_dry = block.note.startswith(DRY_RUN)
            lines += [as_dry_run(line) if is_dry else line for line in commands]
    return "\n".join(lines).replace("FOLDER", str(folder)) + "\n"


def as_dry_run(line: str) -> str:
    """Return a command that says what it would do; only those that start a job change."""
    line = line.partition("  # ")[0].rstrip()
    if line.startswith("make "):
        return f'{line} ARGS="--dry-run"'
    return f"{line} --dry-run" if re.match(r"(t2g|\S*python -m jobs\.)", line) and "--dry-run" not in line else line


def test_a_script_is_made_of_blocks() -> None:
    text = "```\nt2g init a && cd a\n```\n```python\n# f.py\nx = 1\n```\n<!-- dry run: long -->\n"
    text += "```\nt2g train \\\n  m=FOLDER\n```\n<!-- not run: needs a GPU -->\n```\nnvidia-smi\n```\n"
    assert make_script(text, Path("/m")).splitlines() == [
        "set -eu", "t2g init a && cd a", "cat > f.py <<'END_OF_FILE'", "# f.py", "x = 1", "END_OF_FILE",
        "t2g train    m=/m --dry-run",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("file", NEWCOMER, ids=name_of)
def test_the_commands_of_a_document_work(file: Path, tmp_path: Path) -> None:
    """In a folder with the repository's files as links, so that nothing is written into the checkout."""
    if (ROOT / ".venv").is_symlink():
        pytest.skip(".venv is that of another checkout, which `make` would empty and build again for this one")
    model = tmp_path / "model"
    work = tmp_path / "work"
    random_model(model)
    work.mkdir()
    for name in ("Makefile", "pyproject.toml", ".venv", "actors", "configs", "docker", "jobs", "t2g", "tests"):
        (work / name).symlink_to(ROOT / name)
    script = make_script(read(file), model)
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    document_environ = environ | {"PATH": f"{ROOT}/.venv/bin:{environ['PATH']}", "RAY_AUTH_MODE": "disabled"}
    command = ["bash", "-c", script]
    done = subprocess.run(
        command, cwd=work, env=document_environ, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
