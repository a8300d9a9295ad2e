"""Isolate the calling process and its children by namespaces, a minimal root file system and limits. Linux only.

Each step returns whether it worked; none raises because the machine does not allow it. Isolation without namespaces is
in `t2g.sandbox.box.confine`.
"""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Collection, Iterable
from pathlib import Path

from t2g.sandbox.box.confine import DEVICES, NO_NEW_PRIVS, check_result, libc

# What `SandboxConfig.require` may name, and the mechanisms of Outcome.isolation that each provide it.
MECHANISMS = {"processes": {"pid", "signals"}, "files": {"mount", "landlock"}, "network": {"network", "seccomp"}}
# A user id of this range, which systemd reserves for dynamic users.
FIRST_THROWAWAY_UID = 61184
NUM_THROWAWAY_UIDS = 4000
_MAX_READINGS = 20  # readings of /proc take some milliseconds each

# Namespaces, as flags of unshare and clone.
USER = 0x10000000
PID = 0x20000000
NETWORK = 0x40000000
MOUNT = 0x00020000
IPC = 0x08000000
# Flags of mount.
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
# Attributes of mount_setattr, and its flag.
_ATTR_RDONLY = 1
_ATTR_NOSUID = 2
_ATTR_NODEV = 4
_AT_RECURSIVE = 0x8000
_MNT_DETACH = 2  # flag of umount2
# System calls without a function in the C library.
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Operations of prctl.
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def missing_isolation(require: Iterable[str], in_force: Collection[str]) -> list[str]:
    """Return the required names of MECHANISMS for which no mechanism is in force.

    Without isolated files, processes are not isolated either: /proc shows the memory of processes of the same user.
    """
    missing = {name for name, mechanisms in MECHANISMS.items() if mechanisms.isdisjoint(in_force)}
    if "files" in missing:
        missing.add("processes")
    return [name for name in require if name in missing]


def unshare(flag: int) -> bool:
    return libc.unshare(flag) == 0


def fork_isolated() -> int:
    """Fork into a new process namespace if the machine allows one, else as `os.fork`.

    After `unshare` the calling process could start no thread. This function calls `clone` instead, between Python's
    hooks of a fork.
    """
    clone = _SYS_CLONE[os.uname().machine]
    ctypes.pythonapi.PyOS_BeforeFork()
    process = libc.syscall(clone, PID | signal.SIGCHLD, 0, 0, 0, 0)
    if process == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if process < 0:
        return os.fork()
    return process


def new_user_namespace(proc: int) -> bool:
    """Enter a user namespace that keeps the caller's ids: all capabilities inside, none outside.

    Args:
        proc: Open descriptor of /proc.
    """
    uid = os.geteuid()
    gid = os.getegid()
    if not unshare(USER):
        return False
    texts = {"setgroups": "deny", "gid_map": f"{gid} {gid} 1", "uid_map": f"{uid} {uid} 1"}
    for name, text in texts.items():
        try:
            with open(os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc), "w", encoding="ascii") as file:
                file.write(text)
        except OSError:
            return False
    return True


def become_throwaway_user(number: int, readable: Iterable[str]) -> bool:
    """Change root into a user that owns nothing, if that user can still read `readable`.

    Args:
        number: Selects the user id, so that sandboxes have different ones.
        readable: Files and folders that must stay readable.
    """
    uid = FIRST_THROWAWAY_UID + number % NUM_THROWAWAY_UIDS
    folders: set[str | Path] = set()
    for path in readable:
        folders.update(filter(os.path.isdir, [path, *Path(path).parents]))
    try:
        if os.geteuid() != 0 or not all(os.stat(folder).st_mode & 0o001 for folder in folders):
            return False
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        return False
    set_dumpable(True)  # else /proc/self/uid_map belongs to root
    return True


def make_minimal_root(folder: str, visible: Iterable[str], tmp_bytes: int) -> bool:
    """Replace the root by a read-only file system with visible files, five devices and a writable working folder.

    The root is in a new mount namespace. The working folder is /tmp, or /box if a visible path lies in /tmp.
    Otherwise the solution could rename a folder on that path and replace modules that the tests import.

    Args:
        folder: An existing empty folder, in which the root is built.
        visible: Absolute files and folders.
        tmp_bytes: Size of the working folder.
    """
    paths = sorted({os.path.normpath(path) for path in visible})
    work_folder = "/tmp"
    if any(path.startswith("/tmp/") for path in paths):
        work_folder = "/box"
    try:
        check_result(libc.unshare(MOUNT))
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID, "size=1m,mode=755")
        for path in paths:
            if not os.path.lexists(folder + path) and os.path.lexists(path):
                _bind(folder, path)
        for device in DEVICES:
            _bind(folder, device, _ATTR_NOSUID)
        os.mkdir(folder + work_folder)
        options = f"size={tmp_bytes},nr_inodes=4096,mode=1777"
        _mount("tmpfs", folder + work_folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
        _set_attributes(folder, _ATTR_RDONLY | _ATTR_NOSUID, 0)
        os.chdir(folder)
        check_result(libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."))
        check_result(libc.umount2(b".", _MNT_DETACH))
        os.chdir(work_folder)
    except (OSError, KeyError):
        return False
    return True


def _bind(folder: str, path: str, attributes: int = _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV) -> None:
    """Make `path` visible under `folder`: copy a symbolic link, bind anything else read-only."""
    target = folder + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(path, target, None, _MS_BIND | _MS_REC, None)
    _set_attributes(target, attributes, _AT_RECURSIVE)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    names = [os.fsencode(source), os.fsencode(target), _encode(kind)]
    check_result(libc.mount(*names, ctypes.c_ulong(flags), _encode(options)))


def _encode(text: str | None) -> bytes | None:
    if text is None:
        return None
    return os.fsencode(text)


def _set_attributes(path: str, attributes: int, flags: int) -> None:
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # struct mount_attr
    size = ctypes.c_size_t(ctypes.sizeof(request))
    address = ctypes.byref(request)
    check_result(libc.syscall(_SYS_MOUNT_SETATTR, -100, os.fsencode(path), flags, address, size))


def drop_privileges() -> None:
    """Drop all capabilities for good, so that no set-uid program can restore them, and make the process undumpable."""
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    no_capabilities = (ctypes.c_uint32 * 6)()
    check_result(libc.capset(ctypes.byref(header), ctypes.byref(no_capabilities)))
    set_dumpable(False)


def set_dumpable(is_dumpable: bool) -> None:
    """Set whether other processes of this user can read the memory, environment and open files of this one."""
    libc.prctl(_PR_SET_DUMPABLE, int(is_dumpable), 0, 0, 0)


def die_with_parent() -> None:
    libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def adopt_orphans() -> None:
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_limits(limits: dict[int, int]) -> None:
    """Lower limits of this process and its later children.

    Args:
        limits: Value by `resource.RLIMIT_*`. RLIMIT_NPROC counts all processes of this user in this user namespace.
    """
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))


def _status(process: int | str) -> dict[str, str]:
    """Return the lines of /proc/PID/status by name; {} if the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
        return dict(line.split(":", 1) for line in file if ":" in line)
    return {}


def count_tasks(uid: int) -> int:
    """Return the number of processes and threads of a user, as RLIMIT_NPROC counts them outside a user namespace."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        status = _status(name)
        # The owner of the folder in /proc is root for a process that is not dumpable.
        if status and int(status["Uid"].split()[0]) == uid:
            count += int(status["Threads"])
    return count


def children(parent: int) -> list[int]:
    """Return the processes that `parent` started or adopted, including zombies."""
    pids: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
                pids += map(int, file.read().split())
    return pids


def descendants(parent: int) -> list[int]:
    """Return `children` of the process, of those and so on."""
    pids = children(parent)
    return pids + [descendant for process in pids for descendant in descendants(process)]


def has_running_processes(supervisor_pid: int, tester_pid: int, *, has_worker: bool) -> bool:
    """Return whether a process that the solution started still runs, by the kernel's process list.

    /proc is read one process after the other. A process that forks and ends meanwhile is read as ended, and its child
    was not in the list yet. Two readings must therefore agree on the ended processes. If no two do, the solution keeps
    starting processes.

    Args:
        supervisor_pid: Ancestor of all processes of the run. It may have adopted orphans of the solution, as may
            `tester_pid`.
        tester_pid: The tests' process, a child of the supervisor.
        has_worker: The children of `tester_pid` are the solution's process and processes that the tests started.
    """
    ended_before = None
    for _ in range(_MAX_READINGS):
        known = {supervisor_pid, tester_pid}
        if has_worker:
            known.update(children(tester_pid))
        states = {process: _state(process) for process in descendants(supervisor_pid) if process not in known}
        if any(state not in "ZX" for state in states.values()):
            return True
        if states.keys() == ended_before:
            return False
        ended_before = states.keys()
    return True


def _state(process: int) -> str:
    """Return the state as in /proc: Z or X for a process that has ended."""
    return _status(process).get("State", "X").strip()[0]


def memory_of(process: int | str, names: Iterable[str] = ("RssAnon", "RssShmem")) -> int:
    """Return the memory of a process in bytes, by default without mapped files; 0 if it has ended.

    Args:
        names: Lines of /proc/PID/status to add up.
    """
    status = _status(process)
    kibibytes = [int(status.get(name, "0").split()[0]) for name in names]
    return sum(kibibytes) * 1024
