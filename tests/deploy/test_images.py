"""The images: pinned as the project is, unprivileged, checked by their own last step. Read as text; none is built."""

import re
import shlex
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from committed import FOLDER, ROOT
from docker_programs import load_program

from t2g.config import PolicyJob, loading
from t2g.deploy import check_config, manifests

FILES = {"gpu": ROOT / "docker" / "Dockerfile", "cpu": ROOT / "docker" / "Dockerfile.cpu"}
README = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
SIZES = {8: ROOT / "t2g" / "guides" / "04-on-gpus.md", 32: ROOT / "docker" / "README.md"}  # GPUs -> where they stand
by_kind = pytest.mark.parametrize("kind", FILES)
Instruction = tuple[str, str]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    return load_program("install")


def instructions(kind: str) -> list[Instruction]:
    """(RUN, its words), (COPY, ...), continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", FILES[kind].read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    pairs = []
    for line in lines:
        name, _, rest = line.partition(" ")
        if name:
            pairs.append((name, rest))
    return pairs


def runs(kind: str) -> list[str]:
    return [rest for name, rest in instructions(kind) if name == "RUN"]


@by_kind
def test_the_base_is_pinned_and_the_same_in_all_build_stages(kind: str) -> None:
    bases = {rest.split()[0] for name, rest in instructions(kind) if name == "FROM"}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", bases.pop())
    assert [rest for name, rest in instructions("gpu") if name == "FROM"] == [
        rest for name, rest in instructions("cpu") if name == "FROM"
    ]


@by_kind
def test_packages_are_those_of_the_constraints(kind: str, install: ModuleType) -> None:
    (tools,) = [words for words in runs(kind) if "pip install --no-cache-dir" in words]
    uv, _, rest = tools.partition(" && ")
    assert uv.endswith(f" --require-hashes --requirement {Path(install.UV_PINS).name}")
    packages, project = (shlex.split(words) for words in (rest, *runs(kind)) if words.startswith("uv pip install"))
    pins = [Path(file).name for file in install.pin_files(kind)]
    pin_options = [packages[i + 1] for i, word in enumerate(packages) if word in ("--constraints", "--overrides")]
    assert [*pin_options, Path(install.UV_PINS).name] == pins
    assert "--require-hashes" in packages
    extras = [packages[i + 1] for i, word in enumerate(packages) if word == "--extra"]
    assert extras == [kind, "wandb"]
    assert packages[packages.index("--requirements") + 1] == "pyproject.toml"
    assert project[project.index("--no-deps") + 1] == "."
    assert ("--torch-backend" in packages) is (kind == "cpu")


@by_kind
def test_what_is_copied_is_there_and_in_the_context(kind: str) -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignored[0] == "*"
    allowed = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for name, rest in instructions(kind):
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatchcase(source, pattern) for pattern in allowed), source


def test_nothing_private_is_in_the_context() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in ("runs/x", ".env", ".git/config", "tests/data/slf5k.json", ".venv/bin/python", "docker/README.md"):
        assert not [p for p in allowed if fnmatchcase(name, p) or name.startswith(f"{p}/")], name


@by_kind
def test_no_entrypoint_no_root_and_the_import_check_comes_last(kind: str, install: ModuleType) -> None:
    names = [name for name, _ in instructions(kind)]
    assert "ENTRYPOINT" not in names
    final = instructions(kind)[len(names) - names[::-1].index("FROM") :]
    *_, cluster = yaml.safe_load_all((FOLDER / "raycluster.yaml").read_text())
    owner = cluster["spec"]["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert ("USER", f"{owner['runAsUser']}:{owner['runAsGroup']}") in final
    assert [name for name, _ in final][-4:] == ["USER", "WORKDIR", "RUN", "CMD"]
    words = shlex.split(final[-2][1])
    checked = words[words.index("-c") + 1]
    if kind == "cpu":
        assert words[0] == "DS_ACCELERATOR=cpu"
        assert f"import os; os.environ['DS_ACCELERATOR'] = 'cpu'; {checked}" == install.CHECK["cpu"]
    else:  # a machine that builds images has no GPU: what is_cuda says can only be tested on a node
        assert install.CHECK["gpu"].startswith(checked)


@by_kind
def test_the_manifests_know_the_images_folders(kind: str) -> None:
    assert ("WORKDIR", manifests.HOME) in instructions(kind)
    assert any(f" {manifests.HOME}/configs" in rest for name, rest in instructions(kind) if name == "COPY")
    assert any(f"--group=t2g {manifests.SHARED}" in words for words in runs(kind))
    tag = manifests.IMAGES[kind == "cpu"]
    assert f"-t {tag} ." in FILES[kind].read_text(encoding="utf-8").splitlines()[0]


def test_the_compiler_is_of_the_cuda_version_of_torch() -> None:
    """FlashInfer and DeepSpeed refuse another; cuda-toolkit is pinned by torch, and its extras pin the compiler."""
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "docker/constraints-gpu.txt").read_text(), re.MULTILINE))
    version = pins["cuda-toolkit"].split(".")[:2]
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime"):
        assert pins[name].split(".")[:2] == version, name


def test_the_image_and_make_gpu_prepare_the_toolkit_alike(install: ModuleType) -> None:
    """Linked by root, where the packages lie; compiled by the user that runs, in its home. Neither sets CUDA_HOME."""
    text = FILES["gpu"].read_text(encoding="utf-8")
    _, build, final = text.split("\nFROM ")
    assert "docker/toolkit.py link" in build
    assert final.index("USER 1000") < final.index("toolkit.py compile")
    assert "CUDA_HOME" not in text
    assert "toolkit.py" in Path(install.__file__).read_text()


@by_kind
def test_hadolint_finds_nothing(kind: str) -> None:
    done = subprocess.run(["hadolint", FILES[kind]], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("gpus", SIZES)
def test_documented_sizes_are_what_check_prints(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no reward model lies
    document = SIZES[gpus].read_text(encoding="utf-8")
    match = re.search(rf"^{gpus} GPUs: `([^`]*)`\n\n```text\n(.*?)```$", document, re.MULTILINE | re.DOTALL)
    command, block = match.groups()
    words = shlex.split(command)
    assert words[:5] == ["python", "-m", "jobs.deploy", "check", "--config"]
    config = loading.load(PolicyJob, ROOT / words[5], words[6:], environ={}, cwd=tmp_path)
    problems, answer = check_config(config)
    report = [line for line in answer.splitlines() if not line.startswith(("warning", "reward: the size"))]
    assert block.strip() == "\n".join(report).strip()
    assert f"in all: {gpus} GPUs" in block
    assert problems == []


def test_the_readme_says_what_was_never_done() -> None:
    assert "**never applied to a live cluster**" in README
    assert "**No image was built here**" in README
