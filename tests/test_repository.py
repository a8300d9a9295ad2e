"""Rules of the repository that no linter checks: imports, layout, pins and shipped configs."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pydantic import BaseModel

from configs import shipped
from t2g.config import (
    AnnotateJob,
    BenchmarkJob,
    CompareJob,
    DemoJob,
    EvaluateJob,
    PolicyEvaluationJob,
    PolicyJob,
    RewardJob,
    ScoreJob,
    ServeJob,
    SFTJob,
    loading,
)

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("t2g", "actors", "jobs")
TOP_LEVEL = {
    "t2g",
    "actors",
    "jobs",
    "configs",
    "tests",
    "docker",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "LICENSE",
}
MAX_LINES = 400
LATE = {"vllm", "deepspeed"}  # imported inside functions only
INSIDE_VLLM = {ROOT / "actors" / "vllm_compat" / name for name in ("executor.py", "plugin.py", "scheduler.py")}
RAY_CALLS = re.compile(r"\.remote\(|\bray\.get\(")
SCHEMAS: dict[str, type[BaseModel]] = {
    "policy": PolicyJob,
    "demo": DemoJob,
    "reward": RewardJob,
    "sft": SFTJob,
    "annotate": AnnotateJob,
    "reward_study": CompareJob,
    "evaluate": EvaluateJob,
    "evaluate_policy": PolicyEvaluationJob,
    "evaluate_temperatures": PolicyEvaluationJob,
    "score": ScoreJob,
    "serve": ServeJob,
    "compare": CompareJob,
    "compare_more": CompareJob,
    "compare_teacher": CompareJob,
    "compare_facts": CompareJob,
    "compare_code": CompareJob,
    "compare_repair": CompareJob,
    "compare_tools": CompareJob,
    "code": DemoJob,
    "repair": DemoJob,
    "tools": DemoJob,
    "facts10": DemoJob,
    "facts20": DemoJob,
    "sync": BenchmarkJob,
    "all": BenchmarkJob,
    "one_gpu": PolicyJob,
    "gpu_check": DemoJob,
}
CONFIGS = [file for file in shipped() if file.parent.name != "methods"]  # for those see study/test_methods


def list_modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def find_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level package of each import, also inside functions: `from a.b import c` yields a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def find_eager_imports(tree: ast.Module) -> set[str]:
    """Return the packages that importing the module imports: all but those inside functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    nodes = (
        node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside
    )
    return {name for node in nodes for name in find_imports(node)}


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def read_pins(kind: str) -> dict[str, str]:
    """Return the exact version of each package in the constraints file of a set."""
    lines = (ROOT / "docker" / f"constraints-{kind}.txt").read_text().splitlines()
    fields = [line.split()[0].split("==") for line in lines if line[:1].isalnum()]
    assert all(len(field) == 2 for field in fields), "a constraint that is not name==version"
    return dict(fields)


def test_eager_imports_are_distinguished_from_late_ones() -> None:
    tree = ast.parse("import a.b\nif 1:\n    from c import d\nclass K:\n    import e\n    def f(s): import g\n")
    assert find_eager_imports(tree) == {"a", "c", "e"}
    assert set(find_imports(tree)) == {"a", "c", "e", "g"}


def test_only_actors_and_jobs_call_ray() -> None:
    assert [file for file in list_modules("t2g") if RAY_CALLS.search(file.read_text(encoding="utf-8"))] == []


def test_the_method_never_imports_ray_vllm_or_deepspeed() -> None:
    wrong = {
        file: imports for file in list_modules("t2g") if (imports := set(find_imports(parse(file))) & (LATE | {"ray"}))
    }
    assert wrong == {}


def test_heavy_packages_are_imported_late() -> None:
    files = [file for package in PACKAGES for file in list_modules(package) if file not in INSIDE_VLLM]
    wrong = {file: imports for file in files if (imports := find_eager_imports(parse(file)) & LATE)}
    assert wrong == {}


def test_production_code_imports_the_tiny_world_late() -> None:
    """A run on a user's data never loads it."""
    files = [file for package in PACKAGES for file in list_modules(package) if "tiny" not in file.parts]
    assert [file for file in files if re.search(r"^from t2g\.tasks\.tiny", file.read_text(), re.MULTILINE)] == []


def list_tracked_files() -> list[str]:
    """Return the files of the repository; a user may keep others beside them."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return listed.stdout.splitlines()


def test_nothing_is_added_to_the_top_level() -> None:
    tops = {line.partition("/")[0] for line in list_tracked_files()}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


def find_docstrings(tree: ast.Module) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    yield from (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented))


def find_missing_citations(docstring: str, folder: Path, known: set[str]) -> list[str]:
    """Return the cited paths that do not exist: those below a folder of the repository, and documents and modules.

    known: names that exist somewhere or that the code writes. A user's file begins with `my`, as `my_harness.py`.
    """
    cited = re.findall(r"[\w./-]+\.(?:md|py|yaml|toml|txt|json|jsonl|j2)\b", docstring)
    in_repository = [name for name in cited if name.partition("/")[0] in TOP_LEVEL or name.endswith((".md", ".py"))]
    missing: list[str] = []
    for name in in_repository:
        exists = (ROOT / name).exists() or (folder / name).exists()
        is_base_name = "/" not in name and name in known
        is_example = Path(name).name.startswith("my")
        if not (exists or is_base_name or is_example):
            missing.append(name)
    return missing


def test_every_file_that_a_docstring_cites_exists() -> None:
    files = [ROOT / name for name in list_tracked_files() if name.endswith(".py")]
    trees = {file: parse(file) for file in files}
    known = {file.name for file in files}
    for tree in (tree for file, tree in trees.items() if ROOT / "tests" not in file.parents):
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings among them
        known |= {str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in texts}
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file, tree in trees.items()
        for docstring in find_docstrings(tree)
        for name in find_missing_citations(docstring, file.parent, known)
    }
    assert missing == set()
    assert find_missing_citations("see method.md and t2g/no.py", ROOT, {"a.py"}) == ["method.md", "t2g/no.py"]


USER_FILES = {
    "my.py": "import os, sys\nfrom t2g import *\n",
    "models.py": "",  # the names of modules of tests/
    "fakes/__init__.py": "",
    "conftest.py": "raise RuntimeError('a conftest.py of the user')\n",
    "test_mine.py": "def test_mine():\n    assert False\n",
    "pytest.ini": "[pytest]\naddopts = --no-such-option\n",
    "ruff.toml": "line-length = 20\n",
    "my.jsonl": "{}\n",
    "configs/own/mine.yaml": "broken: [\n",
    "data/notes.txt": "notes\n",
}


def test_files_of_a_user_change_neither_lint_nor_tests(tmp_path: Path) -> None:
    for name in [*list_tracked_files(), *USER_FILES]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        content = USER_FILES[name].encode() if name in USER_FILES else (ROOT / name).read_bytes()
        (tmp_path / name).write_bytes(content)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set in a git hook
    for arguments in (["init", "-q"], ["add", "configs/tiny", "t2g", "tests", "Makefile"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, env=environ, check=True, timeout=60)
    makefile = (ROOT / "Makefile").read_text()
    (code,) = re.findall(r"^CODE := (.*)$", makefile, re.M)
    (ruff,) = re.findall(r"^RUFF := \$\(RUN\) (.*?) &&", makefile, re.M)
    lint = ruff.replace("$(CODE)", code)
    (test,) = re.findall(r"^PYTEST := \$\(RUN\) (.*)$", makefile, re.M)
    some = ["tests/test_repository.py", "tests/config", "-k", "top_level or auto or config_loads"]
    for command in (lint.split(), [*test.split(), *some]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_stay_small(package: str) -> None:
    """Docstrings and comments are not counted: the limit must not make them shorter."""
    sizes = {file: code_lines(file.read_text(encoding="utf-8")) for file in list_modules(package)}
    assert {file: size for file, size in sizes.items() if size > MAX_LINES} == {}


def code_lines(source: str) -> int:
    """Return the number of lines that are neither blank nor a comment nor part of a docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(i not in documented and bool(line.strip()) and line.lstrip()[0] != "#" for i, line in lines)


def test_modules_lie_in_packages() -> None:
    """At most six modules lie flat in t2g and none in actors; the modules flat in jobs are the jobs."""
    flat = {}
    for package in PACKAGES:
        flat[package] = [file.name for file in (ROOT / package).glob("*.py") if file.stem != "__init__"]
    assert len(flat["t2g"]) <= 6
    assert flat["actors"] == []
    assert {name.removesuffix(".py") for name in flat["jobs"]} <= set(JOBS)


def test_no_two_files_have_one_name() -> None:
    """A reader who searches a file by name finds one. `t2g init` copies the starter's files to a user's folder."""
    files = [file for package in PACKAGES for file in list_modules(package) if "starter" not in file.parts]
    names = [file.name for file in files if file.stem not in ("__init__", "__main__")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_docstring_and_no_code_in_its_init(package: str) -> None:
    """Only re-exports of public names may follow the docstring."""
    for folder in sorted({file.parent for file in list_modules(package)}):
        tree = parse(folder / "__init__.py")
        assert ast.get_docstring(tree), f"{folder}/__init__.py has no docstring"
        code = [n for n in tree.body[1:] if not isinstance(n, ast.ImportFrom | ast.Assign)]
        assert code == [], f"{folder}/__init__.py holds code"


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_constraints_pin_every_requirement(kind: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras[kind], *extras["dev"], *extras["eval"], *extras["wandb"]]
    pinned = read_pins(kind)
    for text in requirements:
        requirement = Requirement(text)
        assert requirement.name in pinned, f"{requirement.name} has no exact version"
        assert requirement.specifier.contains(pinned[requirement.name], prereleases=True), text


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_constraints_name_no_host_and_no_path(kind: str) -> None:
    lines = (ROOT / "docker" / f"constraints-{kind}.txt").read_text().splitlines()
    assert not re.search(r"://|index-url|find-links|@ ", "\n".join(line for line in lines if line[0] != "#"))


def test_there_are_configs() -> None:
    assert {file.stem for file in CONFIGS} >= {"policy", "demo"}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_shipped_config_loads(file: Path) -> None:
    loading.load(SCHEMAS[file.stem], file, environ={}, cwd=ROOT)


PROGRAM = '__name__ == "__main__"'
FLAT_JOBS = [f.stem for f in (ROOT / "jobs").glob("*.py") if PROGRAM in f.read_text(encoding="utf-8")]
JOBS = sorted([*FLAT_JOBS, *(f.parent.name for f in (ROOT / "jobs").glob("*/__main__.py"))])


@pytest.mark.parametrize("job", JOBS)
def test_no_job_loads_anything_heavy_before_it_runs(job: str) -> None:
    """`--help` takes under a second only without torch, ray, transformers and datasets."""
    module = f"{job}.__main__" if (ROOT / "jobs" / job).is_dir() else job
    heavy = {"torch", "ray", "transformers", "datasets"}
    code = f"import sys, jobs.{module}; print(*sorted({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_import_contract_of_jobs_common_names_every_job() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (forbidden,) = (c["forbidden_modules"] for c in contracts if c.get("source_modules") == ["jobs.common"])
    assert forbidden == [f"jobs.{job}" for job in JOBS]
