"""The rules of the house that no linter knows: where Ray is spoken to, what may stand where, what belongs together."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
INSIDE_VLLM = {ROOT / "actors" / "weights" / "vllm_plugin.py", ROOT / "actors" / "engines" / "scheduler.py"}
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
    "score": ScoreJob,
    "serve": ServeJob,
    "compare": CompareJob,
    "compare_more": CompareJob,
    "compare_facts": CompareJob,
    "compare_code": CompareJob,
    "code": DemoJob,
    "facts10": DemoJob,
    "facts20": DemoJob,
    "sync": BenchmarkJob,
    "all": BenchmarkJob,
    "one_gpu": PolicyJob,
    "gpu_check": DemoJob,
}
CONFIGS = [file for file in shipped() if file.parent.name != "methods"]  # for those see study/test_methods


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Top names of all modules that `tree` imports, inside functions too: `import a.b` and `from a.b import c` -> a."""
    for node in ast.walk(tree):
        yield from imported(node)


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").partition(".")[0]


def eager_imports(tree: ast.Module) -> set[str]:
    """What is imported as soon as the module is: everything outside functions, class bodies and conditions included."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    found = (
        node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside
    )
    return {name for node in found for name in imports(node)}


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def pins(kind: str) -> dict[str, str]:
    """Package -> exact version in the constraints of the set."""
    lines = (ROOT / "docker" / f"constraints-{kind}.txt").read_text().splitlines()
    fields = [line.split()[0].split("==") for line in lines if line[:1].isalnum()]
    assert all(len(field) == 2 for field in fields), "a constraint that is not name==version"
    return dict(fields)


def test_eager_imports_are_told_from_late_ones() -> None:
    tree = ast.parse("import a.b\nif 1:\n    from c import d\nclass K:\n    import e\n    def f(s): import g\n")
    assert eager_imports(tree) == {"a", "c", "e"}
    assert set(imports(tree)) == {"a", "c", "e", "g"}


def test_only_actors_and_jobs_speak_to_ray() -> None:
    assert [file for file in modules("t2g") if RAY_CALLS.search(file.read_text(encoding="utf-8"))] == []


def test_the_method_never_imports_ray_vllm_or_deepspeed() -> None:
    wrong = {file: found for file in modules("t2g") if (found := set(imports(parse(file))) & (LATE | {"ray"}))}
    assert wrong == {}


def test_heavy_packages_are_imported_late() -> None:
    files = [file for package in PACKAGES for file in modules(package) if file not in INSIDE_VLLM]
    wrong = {file: found for file in files if (found := eager_imports(parse(file)) & LATE)}
    assert wrong == {}


def test_nothing_is_added_to_the_top_level() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    tops = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_stay_small(package: str) -> None:
    sizes = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in modules(package)}
    assert {file: size for file, size in sizes.items() if size > MAX_LINES} == {}


def test_rooms_not_a_corridor() -> None:
    """At most five files lie flat in t2g, none in actors; what jobs share lies in a room below them."""
    flat = {package: [f.name for f in (ROOT / package).glob("*.py") if f.stem != "__init__"] for package in PACKAGES}
    assert len(flat["t2g"]) <= 5
    assert flat["actors"] == []
    assert [f"{name}.py" for name in JOBS] == sorted(flat["jobs"])


def test_no_two_files_have_one_name() -> None:
    """Where a program and a room's file would share one, the reader opens the wrong one."""
    names = [file.name for package in PACKAGES for file in modules(package) if file.stem != "__init__"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_door_sign_and_no_code_behind_it(package: str) -> None:
    """`__init__.py` says what lives there; only re-exports of public names may follow the docstring."""
    for folder in sorted({file.parent for file in modules(package)}):
        tree = parse(folder / "__init__.py")
        assert ast.get_docstring(tree), f"{folder} has no door sign"
        code = [n for n in tree.body[1:] if not isinstance(n, ast.ImportFrom | ast.Assign)]
        assert code == [], f"{folder}/__init__.py holds code"


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_constraints_pin_what_the_project_asks_for(kind: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras[kind], *extras["dev"], *extras["eval"], *extras["wandb"]]
    pinned = pins(kind)
    for text in wanted:
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
JOBS = [f.stem for f in sorted((ROOT / "jobs").glob("*.py")) if PROGRAM in f.read_text(encoding="utf-8")]


@pytest.mark.parametrize("job", JOBS)
def test_no_job_loads_anything_heavy_before_it_runs(job: str) -> None:
    """`--help` in under a second: importing the job pulls in neither torch nor ray, transformers or datasets."""
    code = f"import sys, jobs.{job}; print(*sorted({{'torch', 'ray', 'transformers', 'datasets'}} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_contract_of_what_programs_share_names_them_all() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (named,) = (one["forbidden_modules"] for one in contracts if one.get("source_modules") == ["jobs.common"])
    assert named == [f"jobs.{job}" for job in JOBS]
