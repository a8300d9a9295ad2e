"""What `t2g doctor` says of machines that this one is not."""

import resource
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from jobs import doctor
from t2g.resources import machine
from t2g.resources.memory import GIB

INSTALLED = {"flash": "2.1", "guide": "0.11.3"}


def read_version(name: str) -> str:
    if name not in INSTALLED:
        raise PackageNotFoundError(name)
    return INSTALLED[name]


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("flash>=2", None),
        ("guide==0.11.3", None),
        ("sampler>=1; extra == 'audio'", None),
        ("sampler>=1; python_version < '3'", None),
        ("torchvision>=1", None),
        ("sampler==0.7", "engine needs sampler==0.7, which is not installed"),
        ("flash<2", "engine needs flash<2, and 2.1 is installed"),
    ],
)
def test_a_package_that_another_needs_is_missed_before_the_run_misses_it(requirement: str, problem: str | None) -> None:
    check = machine.check_requirements(["engine"], lambda root: [requirement], read_version)
    assert check.verdict == ("ok" if problem is None else "wrong")
    if problem:
        assert check.value == problem


def test_packages_that_are_not_installed_need_nothing() -> None:
    def read(root: str) -> list[str] | None:
        if root == "vllm":
            raise PackageNotFoundError(root)
        return None if root == "bare" else ["flash"]

    check = machine.check_requirements(["vllm", "bare", "engine"], read, read_version)
    assert (check.verdict, check.value) == ("ok", "1 direct requirements are met")


@pytest.mark.parametrize(
    ("features", "on_gpu", "verdict", "value"),
    [
        ({"avx512_f": True, "amx_bf16": True}, False, "ok", "4 cores"),
        ({"avx512_f": True}, False, "note", "4 cores without bfloat16"),
        ({}, False, "note", "4 cores without bfloat16 and AVX-512"),
        ({}, True, "ok", "4 cores without bfloat16 and AVX-512"),
    ],
)
def test_emulated_bfloat16_matters_without_a_gpu(
    features: Mapping[str, bool], on_gpu: bool, verdict: str, value: str
) -> None:
    check = machine.check_cpu(4, features, on_gpu=on_gpu)
    assert (check.verdict, check.value) == (verdict, value)


@pytest.mark.parametrize(
    ("gpus", "verdict"),
    [
        (machine.Gpus(is_cpu_build=True), "ok"),
        (machine.Gpus(is_cpu_build=True, has_driver=True), "note"),
        (machine.Gpus(names=("H100", "H100"), has_driver=True), "ok"),
        (machine.Gpus(has_driver=True), "note"),
        (machine.Gpus(has_driver=True, error="The NVIDIA driver on your system is too old"), "wrong"),
    ],
)
def test_torch_has_to_be_built_for_what_is_here(gpus: machine.Gpus, verdict: str) -> None:
    assert machine.check_gpus(gpus).verdict == verdict


def test_an_old_driver_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> str:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", refuse)
    gpus = machine.read_gpus()
    assert gpus.error == "The NVIDIA driver on your system is too old (found version 12020)."


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({}, "ok"),
        ({"NO_PROXY": "localhost"}, "ok"),
        ({"HTTP_PROXY": ""}, "ok"),
        ({"HTTP_PROXY": "http://proxy:3128"}, "note"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "localhost"}, "note"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "localhost, 127.0.0.1,.svc"}, "ok"),
        ({"all_proxy": "socks5://proxy", "NO_PROXY": "*"}, "ok"),
    ],
)
def test_a_proxy_must_leave_this_machine_out(environ: Mapping[str, str], verdict: str) -> None:
    assert machine.check_proxies(environ).verdict == verdict


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "limit_gib", "verdict"),
    [(12, 12, None, "ok"), (12, 2, None, "note"), (8, 8, None, "wrong"), (128, 100, 8, "wrong"), (128, 100, 16, "ok")],
)
def test_the_memory_is_that_of_the_container(
    total_gib: int, free_gib: int, limit_gib: int | None, verdict: str
) -> None:
    limit = "max" if limit_gib is None else str(limit_gib * GIB)
    check = machine.check_memory(total_gib * GIB, free_gib * GIB, limit=limit, use=str(2 * GIB))
    assert check.verdict == verdict
    assert ("14.0 free" in check.value) == (limit_gib == 16)


def test_limits_below_what_ray_needs() -> None:
    assert machine.check_shared_memory(64 * 2**20).verdict == "note"
    assert machine.check_shared_memory(GIB).verdict == "ok"
    assert machine.check_open_files(1024).verdict == "note"
    assert machine.check_open_files(1_048_576).verdict == "ok"
    assert machine.check_open_files(resource.RLIM_INFINITY).value == "unlimited"


def test_a_full_disk_is_that_of_the_first_folder_that_exists(tmp_path: Path) -> None:
    assert machine.find_parent(tmp_path / "runs" / "one") == tmp_path
    (tmp_path / "file").touch()
    assert machine.find_parent(tmp_path / "file" / "one") == tmp_path
    assert machine.check_disk(tmp_path, GIB).verdict == "wrong"
    assert machine.check_disk(tmp_path, 3 * GIB).verdict == "ok"


def test_the_report_has_each_check_and_its_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [
        machine.Check(name="memory", value="23.6 GiB"),
        machine.Check(name="/dev/shm", value="0.1 GiB", verdict="note", advice="more"),
    ]
    monkeypatch.setattr(machine, "check_machine", lambda folder, environ: checks)
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok     memory    23.6 GiB", "note   /dev/shm  0.1 GiB", "                 more",
    ]  # fmt: skip
    checks.append(machine.Check(name="proxies", value="http_proxy", verdict="wrong", advice="export"))
    assert doctor.main([]) == 2


def test_this_machine_runs_the_suite_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    checks = machine.check_machine(tmp_path / "runs", {})
    names = [check.name for check in checks]
    limits = ["memory", "/dev/shm", "open files", "disk"]
    assert names == ["versions", "packages", "CPU", "GPUs", *limits, "ports", "proxies"]
    assert "torch 2.13.0" in checks[0].value
    assert checks[1].verdict == "ok", checks[1].value
    assert not (tmp_path / "runs").exists()


def test_matrix_instructions_are_named() -> None:
    check = machine.check_cpu(2, {"amx_tile": True, "avx512_bf16": True, "avx512_f": True}, on_gpu=False)
    assert (check.verdict, check.value) == ("ok", "2 cores, with AMX")


def test_a_port_of_another_ray_is_a_note_and_a_free_one_is_not() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert machine.list_taken_ports([port]) == [port]
    assert machine.list_taken_ports([port]) == []
    assert machine.check_ports([]).verdict == "ok"
    taken = machine.check_ports([6379])
    assert (taken.verdict, taken.value) == ("note", "6379 in use")
