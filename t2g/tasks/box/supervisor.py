"""The program that `t2g.tasks.sandbox` starts: three processes, one inside the other.

    supervisor   waits, ends everything at the deadline, leaves nothing behind
      tester     new namespaces; reads code and tests; runs the tests; writes the verdict to standard output
        worker   a process namespace of its own; forked before the tests are read; runs the solution

Standard output of the supervisor gets two lines of JSON: what isolates the run, then the verdict. Standard error gets
what tests and solution write past `sys.stdout`.
"""

import json
import os
import signal
import socket
import sys
import time
from typing import Any

from t2g.tasks.box import isolation, tester, worker

GRACE_S = 0.4  # at the deadline the worker's clock rings, after half of this the tester's, then all is killed


def main(plan: dict[str, Any]) -> None:
    """plan: see t2g.tasks.sandbox._plan."""
    isolation.adopt_orphans()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    in_force = ["process_group"]
    if not isolation.unshare(isolation.PID):
        if os.geteuid() == 0 and isolation.become_nobody(os.getpid(), plan["visible"]):
            in_force.append("throwaway_user")
        if isolation.new_user_namespace(proc):
            in_force.append("user")
        if isolation.unshare(isolation.PID):
            in_force.append("pid")
    else:
        in_force.append("pid")
    owner = os.getpid()
    inner = os.fork()
    if inner == 0:
        try:
            _isolate(plan, proc, owner, in_force)
            _tester(plan, in_force)
        finally:
            os._exit(1)
    for file in (0, 1, 2):
        os.close(file)
    _wait(inner, plan["deadline"] + GRACE_S)
    if "pid" not in in_force:
        _sweep()
    os._exit(0)


def _wait(process: int, deadline: float) -> None:
    """Until it ends; at the deadline it is killed, and with it its process namespace."""
    while os.waitpid(process, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return
        time.sleep(0.001)


def _sweep() -> None:
    """Kills what came to us when its parent died, until nothing comes any more."""
    deadline = time.monotonic() + 1
    while (left := isolation.children(os.getpid())) and time.monotonic() < deadline:
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            except OSError:
                continue


def _tester(plan: dict[str, Any], in_force: list[str]) -> None:
    isolation.unshare(isolation.PID)  # of the worker: it cannot even name the tester
    isolation.give_up_privileges()
    os.write(1, json.dumps(in_force).encode() + b"\n")
    ours, theirs = socket.socketpair()
    sys.path[:] = [path for path in sys.path if path != plan["own_code"]] + plan["packages"]
    seconds = plan["deadline"] - time.monotonic()
    alone = {"user", "throwaway_user", "mount"} & set(in_force)  # a new user namespace counts processes from 0
    most = plan["max_processes"] + (3 if alone else isolation.count_tasks(os.geteuid()))
    inner = os.fork()
    isolation.limit_processes(most)  # only now: other sandboxes of this user must not keep ours from starting
    if inner == 0:
        try:
            _worker(plan, theirs, ours, seconds)
        finally:
            os._exit(1)
    theirs.close()
    verdict_file = os.dup(1)
    os.dup2(2, 1)
    clock = tester.Clock(seconds + GRACE_S / 2)
    job = json.loads(sys.stdin.buffer.read())
    verdict = tester.run(ours, inner, job["code"], job["tests"], clock, plan["max_output"])
    data = json.dumps(verdict).encode() + b"\n"
    while data:
        data = data[os.write(verdict_file, data) :]
    os._exit(0)


def _isolate(plan: dict[str, Any], proc: int, owner: int, in_force: list[str]) -> None:
    """Appends to `in_force` what worked. owner: the supervisor's process id, for a user id of this sandbox's own."""
    isolation.die_with_parent()
    for name, flag in (("network", isolation.NETWORK), ("ipc", isolation.IPC), ("mount", isolation.MOUNT)):
        if isolation.unshare(flag):
            in_force.append(name)
    if "mount" in in_force and not isolation.small_root(plan["stage"], plan["visible"], plan["tmp_bytes"]):
        in_force.remove("mount")
    if "mount" not in in_force:
        os.chdir(plan["stage"])
    if os.geteuid() == 0:
        if "mount" not in in_force:
            os.chmod(".", 0o777)
        if isolation.become_nobody(owner, [] if "mount" in in_force else plan["visible"]):
            in_force.append("throwaway_user")
    if "user" not in in_force and isolation.new_user_namespace(proc):
        in_force.append("user")
    os.close(proc)
    isolation.set_limits(**plan["limits"])
    in_force.append("rlimits")


def _worker(plan: dict[str, Any], end: socket.socket, other: socket.socket, seconds: float) -> None:
    """No file is left but the socket, and standard output and error, which are the same pipe."""
    isolation.die_with_parent()
    isolation.adopt_orphans()
    other.close()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    kept = end.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 4096)
    worker.main(end, max(seconds, 0.01), plan["max_output"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
