"""Namespaces, a small file system of its own, and limits, for the calling process and what it starts. Linux only.
What needs no namespaces is in t2g.sandbox.box.confine.

Each step says whether it worked; nothing here raises because the machine does not allow something.
"""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Iterable
from pathlib import Path

from t2g.sandbox.box.confine import DEVICES, check

# What a sandbox may be required to isolate, and what each is met by; the names are those of Outcome.isolation.
MEANS = {"processes": {"pid", "signals"}, "files": {"mount", "landlock"}, "network": {"network", "seccomp"}}
USER, PID, NETWORK = 0x10000000, 0x20000000, 0x40000000
MOUNT, IPC = 0x00020000, 0x08000000
FIRST_THROWAWAY_UID, NUM_THROWAWAY_UIDS = 61184, 4000  # in the range that systemd keeps for users that it makes up
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_RECURSIVE, _MNT_DETACH = 0x8000, 2
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_libc = ctypes.CDLL(None, use_errno=True)
_READINGS = 20  # of /proc, each some milliseconds


def lacking(require: Iterable[str], in_force: Iterable[str]) -> list[str]:
    """Names of MEANS that are required, and met by nothing that is in force. Processes are not isolated where files are
    not: /proc shows the memory of processes of the same user."""
    in_force = set(in_force)
    missing = {name for name, means in MEANS.items() if means.isdisjoint(in_force)}
    return [name for name in require if name in missing or (name == "processes" and "files" in missing)]


def unshare(flag: int) -> bool:
    return _libc.unshare(flag) == 0


def fork_isolated() -> int:
    """`os.fork` into a process namespace of its own, where the machine allows one.

    After `unshare` the calling process could start no thread: so this is `clone`, between what Python does at a fork.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    process = _libc.syscall(_SYS_CLONE[os.uname().machine], PID | signal.SIGCHLD, 0, 0, 0, 0)
    if process == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return process if process >= 0 else os.fork()


def new_user_namespace(proc: int) -> bool:
    """A user namespace with the caller's own ids in it: all capabilities inside, none outside. proc: /proc, open."""
    uid, gid = os.geteuid(), os.getegid()
    if not unshare(USER):
        return False
    for name, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
        try:
            with open(os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc), "w", encoding="ascii") as file:
                file.write(text)
        except OSError:
            return False
    return True


def become_nobody(number: int, needs: Iterable[str]) -> bool:
    """Changes root into a user that owns nothing, if that user can still read `needs`. number: makes it unique."""
    uid = FIRST_THROWAWAY_UID + number % NUM_THROWAWAY_UIDS
    folders = {folder for path in needs for folder in (path, *Path(path).parents) if os.path.isdir(folder)}
    try:
        if os.geteuid() != 0 or not all(os.stat(folder).st_mode & 0o001 for folder in folders):
            return False
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        return False
    show()  # else /proc/self/uid_map is root's
    return True


def small_root(stage: str, visible: Iterable[str], tmp_bytes: int) -> bool:
    """Makes a read-only file system of `visible` (absolute folders and files), five devices and an empty, writable
    working folder of `tmp_bytes` the root. stage: an existing empty folder. Needs MOUNT and its capabilities.

    The working folder is /tmp, or /box where something visible lies in /tmp: in a writable folder the solution could
    rename what leads to it and put modules of its own in the place of those that the tests import.
    """
    paths = sorted({os.path.normpath(path) for path in visible})
    room = "/box" if any(path.startswith("/tmp/") for path in paths) else "/tmp"
    try:
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
        _mount("tmpfs", stage, "tmpfs", _MS_NOSUID, "size=1m,mode=755")
        for path in paths:
            if not os.path.lexists(stage + path) and os.path.lexists(path):
                _show(stage, path)
        for device in DEVICES:
            _show(stage, device, _ATTR_NOSUID)
        os.mkdir(stage + room)
        _mount("tmpfs", stage + room, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={tmp_bytes},nr_inodes=4096,mode=1777")
        _set_attributes(stage, _ATTR_RDONLY | _ATTR_NOSUID, 0)
        os.chdir(stage)
        check(_libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."))
        check(_libc.umount2(b".", _MNT_DETACH))
        os.chdir(room)
    except (OSError, KeyError):
        return False
    return True


def _show(stage: str, path: str, attributes: int = _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV) -> None:
    """`path` at the same place under `stage`: a link as the same link, anything else bound read-only."""
    target = stage + path
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
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    check(_libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def _set_attributes(path: str, attributes: int, flags: int) -> None:
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # struct mount_attr
    size = ctypes.c_size_t(ctypes.sizeof(request))
    check(_libc.syscall(_SYS_MOUNT_SETATTR, -100, os.fsencode(path), flags, ctypes.byref(request), size))


def give_up_privileges() -> None:
    """No capability is left and none can come back, by a set-uid program neither; and `hide`."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)))
    hide()


def hide() -> None:
    """Other processes of the same user can no longer look into the memory, environment and open files of this one."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def show() -> None:
    """The opposite of `hide`."""
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)


def adopt_orphans() -> None:
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_limits(limits: dict[int, int]) -> None:
    """Lower limits of this process and of each that it starts. limits: by `resource.RLIMIT_*`; RLIMIT_NPROC counts all
    processes of this user in this user namespace.
    """
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))


def _status(process: int | str) -> dict[str, str]:
    """Return the lines of /proc/PID/status by name; {}: it ended."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
        return dict(line.split(":", 1) for line in file if ":" in line)
    return {}


def count_tasks(uid: int) -> int:
    """Return the number of processes and threads of a user, as RLIMIT_NPROC counts them outside a user namespace."""
    found = [_status(name) for name in os.listdir("/proc") if name.isdigit()]
    # The folder's owner would not do: it is root once a process has given up its rights.
    return sum(int(status["Threads"]) for status in found if status and int(status["Uid"].split()[0]) == uid)


def children(parent: int) -> list[int]:
    """Return processes that `parent` started or adopted, those that ended and wait to be reaped included."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for task in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def descendants(parent: int) -> list[int]:
    """`children`, and theirs."""
    found = children(parent)
    return found + [below for process in found for below in descendants(process)]


def left_running(own: int, tests: int, *, has_worker: bool) -> bool:
    """Return whether something still runs that the solution started; by the kernel's word, not the solution's.

    own: this process; tests: its child, whose own children are, where it has_worker, the solution's process and what
    the tests started. Both may have adopted what a process of the solution orphaned.

    /proc is read one process after the other: one that forks and ends meanwhile is read as ended, and its child was
    not in the list yet. So two readings must agree on who has ended; where none do, something is born all the time.
    """
    before = None
    for _ in range(_READINGS):
        known = {own, tests, *(children(tests) if has_worker else ())}
        states = {process: _state(process) for process in descendants(own) if process not in known}
        if any(state not in "ZX" for state in states.values()):
            return True
        if states.keys() == before:
            return False
        before = states.keys()
    return True


def _state(process: int) -> str:
    """Return the state as in /proc: Z or X once it has ended."""
    return _status(process).get("State", "X").strip()[0]


def memory_of(process: int | str, names: Iterable[str] = ("RssAnon", "RssShmem")) -> int:
    """Return the bytes that only this process and its forks hold, without the files that it maps; 0: it ended.

    names: lines of /proc/PID/status to add up.
    """
    status = _status(process)
    return sum(int(status.get(name, "0").split()[0]) for name in names) * 1024
