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
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# Operations of prctl.
NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2  # the filter mode of seccomp

# System calls of Landlock: the same numbers on every architecture.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
# Rights of Landlock.
_EXECUTE = 1
_READ = 4
_LIST = 8
_FILE_RIGHTS = 0xC007  # execute, write, read, truncate, ioctl: rights that a rule for a file may name
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by ABI; 16 from ABI 5 on
_TCP_ABI = 4
_BIND_AND_CONNECT = 3
SIGNAL_ABI = 6
_ABSTRACT_SOCKETS_AND_SIGNALS = 3

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
# Calls that are decided by an argument.
_CLONE = (56, 220)
_PRLIMIT = (302, 261)
_FCNTL = (72, 25)
_IOCTL = (16, 29)
_SOCKETPAIR = (53, 199)
_SIGNALS = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240))  # kill, tkill, tgkill, rt_(tg)sigqueueinfo
# Flags of clone.
_NEW_NAMESPACE = 0x7E020000
_CLONE_PARENT = 0x8000  # makes a sibling, not a child
# Types of sockets.
_STREAM = 1
_SOCKET_TYPE = 0xF  # the bits of the type
_SET_OWNER = (8, 15, 0x8901, 0x8902)  # F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP: the process that the kernel signals

# Codes of a filter's instructions. The jumps after a comparison count the instructions to skip.
_LOAD = 0x20  # the word at this position of the call's data
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_AND = 0x54
_RETURN = 0x06
# What a filter returns.
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_KILL = 0x80000000
# Positions in the data of a call.
_NUMBER_POSITION = 0
_ARCHITECTURE_POSITION = 4
_ARGUMENTS_POSITION = 16  # arguments have eight bytes, the lower half first
_REFUSE_CALL: Instruction = (_RETURN, 0, 0, _ERROR | errno.EPERM)
_ALLOW_CALL: Instruction = (_RETURN, 0, 0, _ALLOW)


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
    network = 0
    if abi >= _TCP_ABI:
        network = _BIND_AND_CONNECT
    scope = 0
    if abi >= SIGNAL_ABI:
        scope = _ABSTRACT_SOCKETS_AND_SIGNALS
    ruleset = struct.pack("QQQ", rights, network, scope)
    rules = check_result(libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0))
    try:
        _add_rules(rules, readable, _EXECUTE | _READ | _LIST, rights & _FILE_RIGHTS)
        _add_rules(rules, writable, rights, rights & _FILE_RIGHTS)
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        check_result(libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _add_rules(rules: int, paths: Iterable[str], rights: int, file_rights: int) -> None:
    """Grant rights on paths.

    Args:
        rules: Descriptor of the ruleset.
        paths: Files and folders; what does not exist is left out.
        rights: Rights to grant.
        file_rights: Those that a rule for a file may name.
    """
    for path in filter(os.path.exists, paths):
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        granted = rights
        if not os.path.isdir(path):
            granted &= file_rights
        check_result(libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", granted, file), 0))
        os.close(file)


def filter_calls(*, keep_modes: bool, own_signals: bool) -> None:
    """Refuse system calls that reach other processes, namespaces or shared memory, by a seccomp filter.

    Args:
        keep_modes: Calls that change modes, owners, times or attributes of files do nothing; else only those of open
            files do nothing.
        own_signals: This process can signal only itself and its process group.

    Raises:
        OSError: The kernel refused the filter.
    """
    architecture, column = _MACHINES[os.uname().machine]
    pretended = [_PRETENDED[name] for name in _PRETENDED_OPEN]
    if keep_modes:
        pretended = list(_PRETENDED.values())
    program = _select_calls(architecture)
    program += _answer_calls(_FORBIDDEN.values(), column, errno.EPERM)
    program += _answer_calls(pretended, column, 0)
    program += _check_arguments(column)
    if own_signals:
        program += _check_signals(column)
    set_filter([*program, _ALLOW_CALL])


def _select_calls(architecture: int) -> list[Instruction]:
    """Return the start of the filter: kill on another architecture, load the number of the call, refuse new calls."""
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_POSITION),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_POSITION),
        (_AT_LEAST, 0, 1, _FIRST_NEW),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]


def _answer_calls(calls: Iterable[tuple[int, int]], column: int, error: int) -> list[Instruction]:
    """Return a filter that answers calls with an error; 0: with success, without doing anything."""
    answer: Instruction = (_RETURN, 0, 0, _ERROR | error)
    program: list[Instruction] = []
    for numbers in calls:
        if numbers[column]:
            program += [(_EQUAL, 0, 1, numbers[column]), answer]
    return program


def _check_arguments(column: int) -> list[Instruction]:
    """Return a filter of the calls that one of their arguments decides."""
    starts_child = [(_ANY_BIT, 0, 1, _NEW_NAMESPACE | _CLONE_PARENT), _REFUSE_CALL, _ALLOW_CALL]
    # A datagram socket of a pair can send to any address of the machine.
    is_stream = [(_AND, 0, 0, _SOCKET_TYPE), (_EQUAL, 1, 0, _STREAM), _REFUSE_CALL, _ALLOW_CALL]
    is_own_process = [(_EQUAL, 1, 0, 0), _REFUSE_CALL, _ALLOW_CALL]  # 0: the process itself
    keeps_owner: list[Instruction] = []
    for command in _SET_OWNER:
        keeps_owner += [(_EQUAL, 0, 1, command), _REFUSE_CALL]
    keeps_owner.append(_ALLOW_CALL)

    program = _match_argument(_CLONE[column], 0, starts_child)
    program += _match_argument(_SOCKETPAIR[column], 1, is_stream)
    program += _match_argument(_PRLIMIT[column], 0, is_own_process)
    program += _match_argument(_FCNTL[column], 1, keeps_owner)
    program += _match_argument(_IOCTL[column], 1, keeps_owner)
    return program


def _check_signals(column: int) -> list[Instruction]:
    """Return a filter that allows signals to this process and, by 0, to its process group only."""
    is_own = [(_EQUAL, 2, 0, os.getpid()), (_EQUAL, 1, 0, 0), _REFUSE_CALL, _ALLOW_CALL]
    program: list[Instruction] = []
    for numbers in _SIGNALS:
        program += _match_argument(numbers[column], 0, is_own)
    return program


def set_filter(program: list[Instruction]) -> None:
    """Set a seccomp filter for this process and its later children.

    Raises:
        OSError: The kernel refused the filter.
    """
    packed = [struct.pack("HBBI", *instruction) for instruction in program]
    data = ctypes.create_string_buffer(b"".join(packed))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(data))
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    check_result(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0))


def _match_argument(call: int, position: int, checks: list[Instruction]) -> list[Instruction]:
    """Return a filter of one system call; `checks` read the lower half of its argument and decide the call."""
    skip_checks = len(checks) + 1
    argument = _ARGUMENTS_POSITION + 8 * position
    return [(_EQUAL, 0, skip_checks, call), (_LOAD, 0, 0, argument), *checks]


def check_result(result: int) -> int:
    """Return the result of a function of the C library.

    Raises:
        OSError: The result is negative.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
