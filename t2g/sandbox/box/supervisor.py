"""One run, in a fork of `parent`: three processes, each a child of the previous one.

    supervisor   waits, makes the verdict, kills all processes at the deadline, leaves none behind
      tester     new namespaces; reads code and tests; runs the tests; sends their names, then their results
        worker   a process namespace of its own; forked before the tests are read; runs the solution

With `sandbox.tests: together` there is no worker; the tester runs the solution, too.

Standard output receives lines of JSON: the isolation in force, written when the time of the run begins; the verdict;
and TIMED_OUT from a supervisor that had to kill the tests. Standard error receives the output of tests and solution
that bypasses `sys.stdout`.
"""

import contextlib
import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from t2g.sandbox.box import confine, isolation, tester, worker
from t2g.sandbox.box.clock import KILL_S, START_S, TIMED_OUT
from t2g.sandbox.box.facts import TestFacts
from t2g.sandbox.box.guard import Guard
from t2g.sandbox.box.remote import Gone, Unsupported
from t2g.sandbox.box.solutions import LocalSolution, RemoteSolution, Solution

if TYPE_CHECKING:
    import pytest

_MAX_RECEIVED_BYTES = 2**22
_MEMORY_INTERVAL_S = 0.02  # between two checks of the memory of all processes


def main(plan: dict[str, Any], session: "pytest.Session") -> None:
    """Run one sandbox in this process, a fork of the parent.

    Args:
        plan: The fields of `SandboxConfig`, with `tests` resolved, and
            cgroup: Folder of a cgroup for this run; "": none.
            folder: An empty folder: the working folder, or where the new root is built.
            visible: Files and folders that the run can read.
        session: See `tester.prepare_session`.
    """
    plan["token"] = secrets.token_hex(8)
    isolation.set_dumpable(True)  # until the namespaces exist: an undumpable process cannot write its own /proc files
    isolation.adopt_orphans()
    os.setsid()
    os.chdir(plan["folder"])
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    in_force = ["process_group"]
    _prefer_oom_kill()
    cgroup = None
    if plan["cgroup"]:
        cgroup = os.open(f"{plan['cgroup']}/cgroup.procs", os.O_WRONLY)  # before the user changes
    has_pid = isolation.unshare(isolation.PID)
    if not has_pid:
        _change_user(proc, os.getpid(), plan["visible"], in_force)
        has_pid = isolation.unshare(isolation.PID)
    if has_pid:
        in_force.append("pid")
    supervisor = os.getpid()
    control, tester_control = socket.socketpair()
    lists_children = os.path.exists("/proc/thread-self/children")  # CONFIG_PROC_CHILDREN of the kernel
    tester_pid = os.fork()
    if tester_pid == 0:
        try:
            control.close()
            if cgroup is not None:
                _enter_cgroup(cgroup, in_force)
            _isolate(plan, proc, supervisor, in_force)
            if not lists_children:
                in_force = [name for name in in_force if name not in isolation.MECHANISMS["processes"]]
            _run_tester(plan, in_force, tester_control, session)
        finally:
            os._exit(1)
    isolation.set_dumpable(False)
    tester_control.close()
    os.close(0)
    os.close(2)
    received = _wait(plan, tester_pid, control)
    verdict = TIMED_OUT
    if received is not None:
        verdict = _make_verdict(received, plan, tester_pid)
    _kill([tester_pid])
    _kill_remaining()
    _write(verdict)
    os._exit(0)


def _write(data: bytes) -> None:
    """Write to standard output, which may take several calls."""
    while data:
        data = data[os.write(1, data) :]


def _prefer_oom_kill() -> None:
    """Let the kernel kill this run before other processes of the machine when memory is exhausted."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _enter_cgroup(cgroup: int, in_force: list[str]) -> None:
    """Move this process into a cgroup, given its open list of processes, and append to `in_force` if that worked."""
    with contextlib.suppress(OSError):
        os.write(cgroup, b"0")
        in_force.append("cgroup")


def _make_verdict(received: bytes, plan: dict[str, Any], tester_pid: int) -> bytes:
    """Return the verdict line; b"" if what the tests' process sent is none.

    A solution passed if the results name every collected test, none failed, and no process of it is left.

    Args:
        received: What the tests' process sent. Its own lines begin with the token: the names of the collected tests, if
            they were collected, and `tester.Run.report`.
        plan: See `main`.
        tester_pid: The tests' process, which still runs.
    """
    token = plan["token"].encode()
    sent = received.removesuffix(token + b"end\n").split(b"\n")
    lines = [line.removeprefix(token) for line in sent if line.startswith(token)]
    try:
        verdict = json.loads(lines[-1])
        if verdict["reason"] == "passed":
            good = [test for test in verdict["tests"] if test["passed"] is True or test["skipped"] is True]
            names = [test["name"] for test in good]
            if len(lines) != 2 or not names or names != json.loads(lines[0]):
                verdict["reason"] = "no_result"
            elif isolation.has_running_processes(os.getpid(), tester_pid, has_worker=plan["tests"] == "separate"):
                verdict["reason"] = "left_processes"
        return json.dumps(verdict, ensure_ascii=False).encode(errors="replace") + b"\n"
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return b""


def _wait(plan: dict[str, Any], tester_pid: int, control: socket.socket) -> bytes | None:
    """Wait for the tests' process and return what it sent; None if it did not end in time.

    Args:
        plan: `memory_mib` bounds the memory of all processes that the tests started. Beyond it they are killed; the
            tests' process continues and reports that.
        tester_pid: The tests' process.
        control: Receives "+" when the time of the run begins, then the lines of `_make_verdict`.
    """
    inherited = isolation.memory_of(os.getpid())  # memory of the parent, which each process of the run shows, too
    end = plan["token"].encode() + b"end\n"
    received = b""
    deadline = time.monotonic() + START_S
    while (remaining_s := deadline - time.monotonic()) > 0:
        if select.select([control], [], [], min(remaining_s, _MEMORY_INTERVAL_S))[0]:
            piece = control.recv(2**16)
            if not received:  # the first byte: the time of the run begins
                deadline = time.monotonic() + plan["timeout_s"] + KILL_S
            received += piece
            if not piece or received.endswith(end) or len(received) > _MAX_RECEIVED_BYTES:
                return received.removeprefix(b"+")
            continue
        if os.waitid(os.P_PID, tester_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return received.removeprefix(b"+")  # a process that it left running may keep its end of the socket open
        started = [process for process in isolation.descendants(os.getpid()) if process != tester_pid]
        memory = sum(max(isolation.memory_of(process) - inherited, 0) for process in started)
        if memory > plan["memory_mib"] * 2**20:
            _kill(started)
    return None


def _kill_remaining() -> None:
    """Kill the processes that this process adopted when their parents ended, until none is left."""
    deadline = time.monotonic() + 1
    while (remaining := isolation.descendants(os.getpid())) and time.monotonic() < deadline:
        _kill(remaining)
        for process in remaining:
            with contextlib.suppress(OSError):
                os.waitpid(process, 0)


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _run_tester(plan: dict[str, Any], in_force: list[str], control: socket.socket, session: "pytest.Session") -> None:
    os.setsid()  # a signal to the process group would reach the supervisor even from inside a process namespace
    tester_end, worker_end = socket.socketpair()
    max_tasks = plan["max_processes"] + _count_other_tasks(in_force)
    worker_id = None
    if plan["tests"] == "separate":
        # In its own process namespace, the worker has no id by which it could name the tester.
        worker_id = isolation.fork_isolated()
    isolation.drop_privileges()
    # Only now: other sandboxes of this user must not prevent the fork above.
    isolation.set_limits({resource.RLIMIT_NPROC: max_tasks})
    if worker_id == 0:
        try:
            _run_worker(plan, in_force, worker_end)
        finally:
            os._exit(1)
    _confine_tester(plan, in_force, control.fileno(), tester_end.fileno())
    if isolation.missing_isolation(plan["require"], in_force):
        os._exit(0)
    job = json.loads(sys.stdin.buffer.read())
    control.send(b"+")
    deadline = time.monotonic() + plan["timeout_s"]
    owner = os.getpid()
    solution = _connect_solution(plan, tester_end, worker_id)
    token = plan["token"]

    def send_names(names: list[str]) -> None:
        control.sendall(f"{token}{json.dumps(names)}\n".encode())

    run = tester.Run(session, solution, send_names, deadline)
    results = run.report(job["code"], job["tests"])
    if os.getpid() == owner:  # no fork that the tests made
        control.sendall(f"{token}{json.dumps(results)}\n{token}end\n".encode())
        control.recv(1)  # until the supervisor has looked for processes of the solution
    os._exit(0)


def _count_other_tasks(in_force: list[str]) -> int:
    """Return how many tasks RLIMIT_NPROC counts in addition to the solution's."""
    if not {"user", "throwaway_user", "mount"}.isdisjoint(in_force):
        return 3  # a new user namespace counts from 0
    return isolation.count_tasks(os.geteuid())


def _confine_tester(plan: dict[str, Any], in_force: list[str], *inherited: int) -> None:
    """Confine the tests' process, then write the isolation in force. Standard output becomes standard error."""
    verdict_file = os.dup(1)
    os.dup2(2, 1)
    _confine(plan, in_force, verdict_file, *inherited)
    os.write(verdict_file, json.dumps(in_force).encode() + b"\n")
    os.close(verdict_file)


def _connect_solution(plan: dict[str, Any], end: socket.socket, worker_id: int | None) -> Solution:
    max_output = plan["max_output_kib"] * 1024
    if worker_id is None:
        return LocalSolution(max_output)

    def add_guard(facts: TestFacts, refuse: Callable[[str], Unsupported]) -> None:
        sys.addaudithook(Guard(facts, plan["visible"], refuse))

    return RemoteSolution(end, worker_id, max_output, add_guard)


def _change_user(proc: int, number: int, readable: list[str], in_force: list[str]) -> None:
    """Change the user and append to `in_force` what worked.

    See `isolation.become_throwaway_user` and `isolation.new_user_namespace`.
    """
    if isolation.become_throwaway_user(number, readable):
        in_force.append("throwaway_user")
    if "user" not in in_force and isolation.new_user_namespace(proc):
        in_force.append("user")


def _isolate(plan: dict[str, Any], proc: int, supervisor: int, in_force: list[str]) -> None:
    """Isolate this process and its later children, and append to `in_force` what worked.

    Args:
        plan: See `main`.
        proc: Open descriptor of /proc.
        supervisor: Process id, from which the sandbox gets a user id of its own.
        in_force: Names of README.md.
    """
    isolation.die_with_parent()
    namespaces = {"network": isolation.NETWORK, "ipc": isolation.IPC}
    in_force += [name for name, flag in namespaces.items() if isolation.unshare(flag)]
    max_file = plan["max_file_mib"] * 2**20
    max_memory = plan["memory_mib"] * 2**20 + isolation.memory_of("self", ["VmSize"])  # the parent's address space
    if isolation.make_minimal_root(plan["folder"], plan["visible"], 4 * max_file):
        in_force.append("mount")
        _change_user(proc, supervisor, [], in_force)
    else:
        os.chdir(plan["folder"])
        if os.geteuid() == 0:
            os.chmod(".", 0o777)
        _change_user(proc, supervisor, plan["visible"], in_force)
    limits = {resource.RLIMIT_AS: max_memory, resource.RLIMIT_CPU: plan["cpu_s"], resource.RLIMIT_FSIZE: max_file}
    isolation.set_limits(limits | {resource.RLIMIT_NOFILE: 64, resource.RLIMIT_CORE: 0})
    in_force.append("rlimits")
    if confine.landlock_abi() > 0 and "mount" not in in_force:
        in_force.append("landlock")
    if confine.has_seccomp():
        in_force.append("seccomp")
        if "pid" not in in_force:
            in_force.append("signals")


def _confine(plan: dict[str, Any], in_force: list[str], *inherited: int) -> None:
    """Close all descriptors above standard error except `inherited`, then restrict files and system calls.

    Each process calls this for itself: within one Landlock domain the solution could signal the tests.
    """
    for low, high in zip([2, *sorted(inherited)], [*sorted(inherited), 4096], strict=True):
        os.closerange(low + 1, high)
    landlock = "landlock" in in_force
    if landlock:
        confine.restrict_files(plan["visible"], [os.getcwd(), *confine.DEVICES])
    if "seccomp" in in_force:
        is_scoped = landlock and confine.landlock_abi() >= confine.SIGNAL_ABI
        confine.filter_calls(keep_modes=landlock, own_signals="signals" in in_force and not is_scoped)


def _run_worker(plan: dict[str, Any], in_force: list[str], end: socket.socket) -> None:
    """Run the solution's process until the tests' process ends.

    It keeps only the socket, and standard output and error, which are the same file.
    """
    isolation.die_with_parent()
    isolation.adopt_orphans()
    os.setsid()  # as in `_run_tester`
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    _confine(plan, in_force, end.fileno())
    with contextlib.suppress(Gone):
        worker.Worker(end, plan["max_output_kib"] * 1024).serve()
