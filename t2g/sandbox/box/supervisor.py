"""One run, in a fork of `parent`: three processes, one inside the other.

    supervisor   waits, ends everything at the deadline, leaves nothing behind
      tester     new namespaces; reads code and tests; runs the tests; writes the verdict to standard output
        worker   a process namespace of its own; forked before the tests are read; runs the solution

With `sandbox.tests: together` there is no worker: the tester runs the solution, too.

Standard output gets lines of JSON: what isolates the run, written when its time begins, the verdict, and TIMED_OUT from
a supervisor that had to kill the tests. Standard error gets what tests and solution write past `sys.stdout`.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from t2g.sandbox.box import confine, isolation, tester, worker
from t2g.sandbox.box.clock import KILL_S, START_S, TIMED_OUT
from t2g.sandbox.box.solutions import LocalSolution, RemoteSolution

if TYPE_CHECKING:
    import pytest

_LOOK_S = 0.02  # between two looks at the memory in all


def main(plan: dict[str, Any], session: "pytest.Session") -> None:
    """Run one sandbox in this process, a fork of the parent.

    Args:
        plan: the fields of `SandboxConfig`, `tests` decided, and
            cgroup: folder of a cgroup for this run; "": there is none.
            stage: an empty folder: the working folder, or where a new root is built.
            visible: files and folders that the run can read.
        session: see `tester.prepare_session`.
    """
    isolation.show()  # until it has its namespaces: a hidden process cannot write its own /proc files
    isolation.adopt_orphans()
    os.setsid()
    os.chdir(plan["stage"])
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    in_force = ["process_group"]
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # before anything else on this machine
    if plan["cgroup"]:
        cgroup = os.open(f"{plan['cgroup']}/cgroup.procs", os.O_WRONLY)  # while this user may
    has_pid = isolation.unshare(isolation.PID)
    if not has_pid:
        _change_user(proc, os.getpid(), plan["visible"], in_force)
        has_pid = isolation.unshare(isolation.PID)
    in_force += ["pid"] * has_pid
    owner, (end, mark) = os.getpid(), socket.socketpair()
    lists_children = os.path.exists("/proc/thread-self/children")  # CONFIG_PROC_CHILDREN of the kernel
    inner = os.fork()
    if inner == 0:
        try:
            end.close()
            if plan["cgroup"]:
                with contextlib.suppress(OSError):
                    os.write(cgroup, b"0")
                    in_force.append("cgroup")
            _isolate(plan, proc, owner, in_force)
            if not lists_children:
                in_force = [name for name in in_force if name not in isolation.MEANS["processes"]]
            _tester(plan, in_force, mark, session)
        finally:
            os._exit(1)
    isolation.hide()
    mark.close()
    os.close(0)
    os.close(2)
    in_time = _wait(plan, inner, end)
    _sweep()
    if not in_time:
        os.write(1, b"\n" + TIMED_OUT)
    os._exit(0)


def _wait(plan: dict[str, Any], tests: int, end: socket.socket) -> bool:
    """Return whether the tests' process ends in time; else it is killed, and with it its process namespace.

    Args:
        plan: its `memory_mib` bounds what all processes that the tests started hold. What goes beyond is killed, but
            the tests live and report it.
        tests: the tests' process.
        end: gets "+" when the time of the run begins, and "?" for whether anything of the solution's still runs.
    """
    held = isolation.memory_of(os.getpid())  # of the parent's memory; each process of the run has it, too
    started, deadline = False, time.monotonic() + START_S
    while (rest := deadline - time.monotonic()) > 0:
        if select.select([end], [], [], min(rest, _LOOK_S))[0]:
            match end.recv(1):
                case b"+":
                    if not started:  # once: what holds this socket could ask for more time again and again
                        started, deadline = True, time.monotonic() + plan["timeout_s"] + KILL_S
                case b"?":
                    left = isolation.left_running(os.getpid(), tests, has_worker=plan["tests"] == "separate")
                    end.send(b"+" if left else b"-")
                case _:
                    os.waitpid(tests, 0)
                    return True
        if os.waitpid(tests, os.WNOHANG)[0]:  # what it left running may hold its end of the socket
            return True
        below = [process for process in isolation.descendants(os.getpid()) if process != tests]
        if sum(max(isolation.memory_of(process) - held, 0) for process in below) > plan["memory_mib"] * 2**20:
            _kill(below)
    os.kill(tests, signal.SIGKILL)
    os.waitpid(tests, 0)
    return False


def _sweep() -> None:
    """Kills what came to us when its parent died, until nothing comes any more."""
    deadline = time.monotonic() + 1
    while (left := isolation.descendants(os.getpid())) and time.monotonic() < deadline:
        _kill(left)
        for process in left:
            with contextlib.suppress(OSError):
                os.waitpid(process, 0)


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _tester(plan: dict[str, Any], in_force: list[str], mark: socket.socket, session: "pytest.Session") -> None:
    os.setsid()  # a signal to its process group would reach the supervisor out of a process namespace, too
    ours, theirs = socket.socketpair()
    alone = {"user", "throwaway_user", "mount"} & set(in_force)  # a new user namespace counts processes from 0
    most = plan["max_processes"] + (3 if alone else isolation.count_tasks(os.geteuid()))
    # The worker cannot even name the tester.
    inner = isolation.fork_isolated() if plan["tests"] == "separate" else None
    isolation.give_up_privileges()
    # Only now: other sandboxes of this user must not keep ours from starting.
    isolation.set_limits({resource.RLIMIT_NPROC: most})
    if inner == 0:
        try:
            _worker(plan, in_force, theirs)
        finally:
            os._exit(1)
    verdict_file = os.dup(1)
    os.dup2(2, 1)
    _confine(plan, in_force, verdict_file, mark.fileno(), ours.fileno())
    os.write(verdict_file, json.dumps(in_force).encode() + b"\n")
    if isolation.lacking(plan["require"], in_force):
        os._exit(0)
    job = json.loads(sys.stdin.buffer.read())
    mark.send(b"+")
    deadline = time.monotonic() + plan["timeout_s"]
    most_output = plan["max_output_kib"] * 1024
    solution = RemoteSolution(ours, inner, most_output) if inner else LocalSolution(most_output)
    verdict = tester.Run(session, solution, mark, deadline).report(job["code"], job["tests"])
    data = json.dumps(verdict, ensure_ascii=False).encode(errors="replace") + b"\n"  # halves of characters are no text
    while data:
        data = data[os.write(verdict_file, data) :]
    os._exit(0)


def _change_user(proc: int, owner: int, needs: list[str], in_force: list[str]) -> None:
    """See `isolation.become_nobody` and `new_user_namespace`. Appends to `in_force` what worked."""
    if isolation.become_nobody(owner, needs):
        in_force.append("throwaway_user")
    if "user" not in in_force and isolation.new_user_namespace(proc):
        in_force.append("user")


def _isolate(plan: dict[str, Any], proc: int, owner: int, in_force: list[str]) -> None:
    """Isolate this process and those that it starts; append to `in_force` what worked.

    Args:
        plan: see `main`.
        proc: /proc, open.
        owner: the supervisor's process id, for a user id of this sandbox's own.
        in_force: names of README.md.
    """
    isolation.die_with_parent()
    namespaces = {"network": isolation.NETWORK, "ipc": isolation.IPC}
    in_force += [name for name, flag in namespaces.items() if isolation.unshare(flag)]
    most_file = plan["max_file_mib"] * 2**20
    most_memory = plan["memory_mib"] * 2**20 + isolation.memory_of("self", ["VmSize"])  # the parent's address space
    if isolation.unshare(isolation.MOUNT) and isolation.small_root(plan["stage"], plan["visible"], 4 * most_file):
        in_force.append("mount")
        _change_user(proc, owner, [], in_force)
    else:
        os.chdir(plan["stage"])
        if os.geteuid() == 0:
            os.chmod(".", 0o777)
        _change_user(proc, owner, plan["visible"], in_force)
    limits = {resource.RLIMIT_AS: most_memory, resource.RLIMIT_CPU: plan["cpu_s"], resource.RLIMIT_FSIZE: most_file}
    isolation.set_limits(limits | {resource.RLIMIT_NOFILE: 64, resource.RLIMIT_CORE: 0})
    in_force.append("rlimits")
    if confine.landlock_abi() > 0 and "mount" not in in_force:
        in_force.append("landlock")
    if confine.has_seccomp():
        in_force.append("seccomp")
        if "pid" not in in_force:
            in_force.append("signals")


def _confine(plan: dict[str, Any], in_force: list[str], *kept: int) -> None:
    """Close what else than `kept` is open above standard error, as the machine's /proc, then restrict files and calls.
    Each process for itself: within one Landlock domain the solution could signal the tests.
    """
    for low, high in zip([2, *sorted(kept)], [*sorted(kept), 4096], strict=True):
        os.closerange(low + 1, high)
    landlock = "landlock" in in_force
    if landlock:
        confine.restrict_files(plan["visible"], [os.getcwd(), *confine.DEVICES])
    if "seccomp" in in_force:
        scoped = landlock and confine.landlock_abi() >= confine.SIGNAL_ABI
        confine.filter_calls(keep_modes=landlock, own_signals="signals" in in_force and not scoped)


def _worker(plan: dict[str, Any], in_force: list[str], end: socket.socket) -> None:
    """No file is left but the socket, and standard output and error, which are the same pipe."""
    isolation.die_with_parent()
    isolation.adopt_orphans()
    os.setsid()  # as the tester
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    _confine(plan, in_force, end.fileno())
    worker.main(end, plan["max_output_kib"] * 1024)
