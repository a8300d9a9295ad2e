"""Restrict the calling process and its children by Landlock and a seccomp filter.

Neither needs privileges or namespaces, so that both work in pods and plain containers. Linux 5.13 or later, on x86-64
and 64-bit ARM.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

Instruction = tuple[int, int, int, int]  # seccomp filter: code, jump if true, jump if false, operand
libc = ctypes.CDLL(None, use_errno=True)
NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_FILE_RIGHTS = 0xC007  # execute, write, read, truncate, ioctl: rights that a rule for a file may name
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by ABI; 16 from ABI 5 on
_TCP_ABI, SIGNAL_ABI = 4, 6
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3

# By architecture: its audit number, and the column of its system call numbers below (0: no such call).
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_FIRST_NEW = 424  # from here on the same numbers on every architecture, io_uring's among them; glibc needs none
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
# Modes, owners, times and attributes of files, which Landlock does not restrict. These calls do nothing and return
# success, since shutil.copy and zipfile call them.
_PRETENDED = {
    "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, 0), "fchown": (93, 55),
    "lchown": (94, 0), "fchownat": (260, 54), "utime": (132, 0), "utimes": (235, 0), "futimesat": (261, 0),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
# They reach an open file of the caller, such as the one that receives the output, whatever files are visible.
_PRETENDED_OPEN = ("fchmod", "fchown", "fsetxattr", "fremovexattr")
_CLONE, _PRLIMIT, _FCNTL, _IOCTL, _SOCKETPAIR = (56, 220), (302, 261), (72, 25), (16, 29), (53, 199)
_SIGNALS = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240))  # kill, tkill, tgkill, rt_(tg)sigqueueinfo
_NEW_NAMESPACE, _CLONE_PARENT = 0x7E020000, 0x8000  # flags of clone; the latter makes a sibling, not a child
_STREAM, _SOCKET_TYPE = 1, 0xF
_SET_OWNER = (8, 15, 0x8901, 0x8902)  # F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP: the process that the kernel signals
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def landlock_abi() -> int:
    """Return the version of this kernel's Landlock, from 1 on; 0: none."""
    return max(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), 0)


def has_seccomp() -> bool:
    """Return whether a seccomp filter can be set."""
    # The kernel reads the address of a filter only if it could set one.
    libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT and os.uname().machine in _MACHINES


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Let this process open only the given files and folders, by Landlock.

    Memory and open files of processes outside cannot be read. From SIGNAL_ABI on, they cannot be signalled.

    Args:
        readable: Files and folders that can be read and executed.
        writable: Files and folders that can also be changed.

    Raises:
        OSError: The kernel refused a rule.
    """
    abi = landlock_abi()
    rights = (1 << _NUM_RIGHTS.get(abi, 16)) - 1
    network = _BIND_AND_CONNECT if abi >= _TCP_ABI else 0
    scope = _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= SIGNAL_ABI else 0
    ruleset = struct.pack("QQQ", rights, network, scope)
    rules = check_result(libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0))
    try:
        for paths, allowed in ((readable, _EXECUTE | _READ | _LIST), (writable, rights)):
            for path in filter(os.path.exists, paths):
                file = os.open(path, os.O_PATH | os.O_CLOEXEC)
                granted = allowed if os.path.isdir(path) else allowed & rights & _FILE_RIGHTS
                check_result(libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", granted, file), 0))
                os.close(file)
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        check_result(libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def filter_calls(*, keep_modes: bool, own_signals: bool) -> None:
    """Refuse system calls that reach other processes, namespaces or shared memory, by a seccomp filter.

    Args:
        keep_modes: Calls that change modes, owners, times or attributes of files do nothing; else only those of open
            files do nothing.
        own_signals: This process can signal only itself and its process group.

    Raises:
        OSError: The kernel refused the filter.
    """
    machine, column = _MACHINES[os.uname().machine]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += [(_AT_LEAST, 0, 1, _FIRST_NEW), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    refused = [(numbers, errno.EPERM) for numbers in _FORBIDDEN.values()]
    refused += [(numbers, 0) for name, numbers in _PRETENDED.items() if keep_modes or name in _PRETENDED_OPEN]
    for numbers, error in refused:
        if numbers[column]:
            program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERROR | error)]
    refuse, allow = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    program += _match_argument(_CLONE[column], 0, [(_ANY_BIT, 0, 1, _NEW_NAMESPACE | _CLONE_PARENT), refuse, allow])
    # A datagram socket of a pair can send to any address of the machine.
    is_stream = [(_AND, 0, 0, _SOCKET_TYPE), (_EQUAL, 1, 0, _STREAM), refuse, allow]
    program += _match_argument(_SOCKETPAIR[column], 1, is_stream)
    program += _match_argument(_PRLIMIT[column], 0, [(_EQUAL, 1, 0, 0), refuse, allow])  # 0: the process itself
    for numbers in (_FCNTL, _IOCTL):
        checks = [step for command in _SET_OWNER for step in ((_EQUAL, 0, 1, command), refuse)]
        program += _match_argument(numbers[column], 1, [*checks, allow])
    if own_signals:
        for numbers in _SIGNALS:
            own = [(_EQUAL, 2, 0, os.getpid()), (_EQUAL, 1, 0, 0), refuse, allow]
            program += _match_argument(numbers[column], 0, own)
    set_filter([*program, allow])


def set_filter(program: list[Instruction]) -> None:
    """Set a seccomp filter for this process and its later children.

    Raises:
        OSError: The kernel refused the filter.
    """
    data = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(data))
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    check_result(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0))


def _match_argument(call: int, position: int, checks: list[Instruction]) -> list[Instruction]:
    """Return a filter of one system call; `checks` read the lower half of its argument and decide the call."""
    return [(_EQUAL, 0, len(checks) + 1, call), (_LOAD, 0, 0, 16 + 8 * position), *checks]


def check_result(result: int) -> int:
    """Return the result of a function of the C library.

    Raises:
        OSError: The result is negative.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
