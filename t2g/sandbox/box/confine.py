"""Landlock and a seccomp filter for the calling process and what it starts: isolation that needs no privileges and no
namespaces, so that it holds in pods and plain containers, too. Linux 5.13 or later, on x86-64 and 64-bit ARM.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

Instruction = tuple[int, int, int, int]  # of a filter: code, jump if true, jump if false, operand
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_OF_A_FILE = 0xC007  # execute, write, read, truncate, ioctl: rights that a rule for a file may name
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by the ABI, 16 from 5 on
_TCP_ABI, SIGNAL_ABI = 4, 6
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3

# Of the kernel's interface: audit's name of the machine, and {system call: number} of those that are not 0 below.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_FIRST_NEW = 424  # from here on one table for all; glibc and Python do without all of these, io_uring is one
_FORBIDDEN = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "kcmp": (312, 272),
    "truncate": (76, 45), "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
# Modes, owners, times and attributes of files, which Landlock leaves open: each of these does nothing, and says so not,
# since shutil.copy and zipfile call them.
_PRETENDED = {
    "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, 0), "fchown": (93, 55),
    "lchown": (94, 0), "fchownat": (260, 54), "utime": (132, 0), "utimes": (235, 0), "futimesat": (261, 0),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
_CLONE, _PRLIMIT, _FCNTL, _IOCTL = (56, 220), (302, 261), (72, 25), (16, 29)
_SIGNALS = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240))  # kill, tkill, tgkill, rt_(tg)sigqueueinfo
_NEW_NAMESPACE = 0x7E020000  # flags of clone
_SET_OWNER = (8, 15, 0x8901, 0x8902)  # F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP: whom the kernel signals for us
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def landlock_abi() -> int:
    """What this kernel's Landlock can do, from 1 on; 0: there is none."""
    return max(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), 0)


def has_seccomp() -> bool:
    """Whether a filter can be set: the kernel looks at the address of one only where it could."""
    _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT and os.uname().machine in _MACHINES


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """From now on files and folders under `readable` can be read and run, those under `writable` changed as well, and
    no others opened. Processes outside cannot be looked into, and where the ABI has it not signalled. OSError.
    """
    abi = landlock_abi()
    rights = (1 << _NUM_RIGHTS.get(abi, 16)) - 1
    network = _BIND_AND_CONNECT if abi >= _TCP_ABI else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= SIGNAL_ABI else 0
    rules = check(_libc.syscall(_CREATE_RULESET, struct.pack("QQQ", rights, network, scope), ctypes.c_size_t(24), 0))
    try:
        for paths, allowed in ((readable, _EXECUTE | _READ | _LIST), (writable, rights)):
            for path in filter(os.path.exists, paths):
                file = os.open(path, os.O_PATH | os.O_CLOEXEC)
                granted = allowed if os.path.isdir(path) else allowed & rights & _OF_A_FILE
                check(_libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", granted, file), 0))
                os.close(file)
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        check(_libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def filter_calls(*, keep_modes: bool, own_signals: bool) -> None:
    """Sets the seccomp filter. OSError. keep_modes: chmod and its like do nothing. own_signals: this process signals
    nobody but itself and its process group.
    """
    machine, column = _MACHINES[os.uname().machine]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += [(_AT_LEAST, 0, 1, _FIRST_NEW), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    refused = [(numbers, errno.EPERM) for numbers in _FORBIDDEN.values()]
    refused += [(numbers, 0) for numbers in _PRETENDED.values() if keep_modes]
    for numbers, error in refused:
        if numbers[column]:
            program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERROR | error)]
    refuse, allow = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    program += _argument(_CLONE[column], 0, [(_ANY_BIT, 0, 1, _NEW_NAMESPACE), refuse, allow])
    program += _argument(_PRLIMIT[column], 0, [(_EQUAL, 1, 0, 0), refuse, allow])  # 0: of the process itself
    for numbers in (_FCNTL, _IOCTL):
        checks = [step for command in _SET_OWNER for step in ((_EQUAL, 0, 1, command), refuse)]
        program += _argument(numbers[column], 1, [*checks, allow])
    if own_signals:
        for numbers in _SIGNALS:
            own = [(_EQUAL, 2, 0, os.getpid()), (_EQUAL, 1, 0, 0), refuse, allow]
            program += _argument(numbers[column], 0, own)
    set_filter([*program, allow])


def set_filter(program: list[Instruction]) -> None:
    """For this process and all that it starts, as long as they live. OSError."""
    data = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    whole = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(data))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    check(_libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, whole, 0, 0))


def _argument(call: int, place: int, checks: list[Instruction]) -> list[Instruction]:
    """`checks` look at the lower half of an argument of that system call; they end it."""
    return [(_EQUAL, 0, len(checks) + 1, call), (_LOAD, 0, 0, 16 + 8 * place), *checks]


def check(result: int) -> int:
    """Return what a function of the C library has returned. OSError where that says that it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
