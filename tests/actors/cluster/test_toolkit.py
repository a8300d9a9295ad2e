"""The environment of builds, with folders of our own in place of the installed packages."""

import sys
from pathlib import Path

import pytest
from docker_programs import load_program

from actors.cluster import toolkit


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit as the packages install it."""
    folder = tmp_path / "nvidia" / "cu13"
    for name in ("bin/nvcc", "lib/libcudart.so.13"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for module in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, module)
    for name in ("CUDA_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_builds_use_the_toolkit_of_the_packages(home: Path) -> None:
    environment = toolkit.build_environment()
    assert environment["CUDA_HOME"] == str(home)
    assert Path(environment["TORCH_EXTENSIONS_DIR"]).is_relative_to(Path.home())


def test_what_the_user_has_set_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert "CUDA_HOME" not in toolkit.build_environment()


def test_another_cpu_has_extensions_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(flags: str) -> str:
        monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags}\n")
        return toolkit.build_environment()["TORCH_EXTENSIONS_DIR"]

    assert folder("avx2 avx512f") == folder("avx2 avx512f") != folder("avx2")


def test_without_a_compiler_nothing_is_set(home: Path) -> None:
    (home / "bin/nvcc").unlink()
    assert toolkit.build_environment() == {}


def test_linkers_find_the_libraries_by_their_usual_names(home: Path) -> None:
    program = load_program("toolkit")
    for _ in range(2):  # a second set-up finds them
        program.link(home)
    assert (home / "lib64/libcudart.so").resolve() == (home / "lib/libcudart.so.13").resolve()
    assert (home / "lib64/stubs/libcuda.so").read_bytes()[:4] == b"\x7fELF"
