"""Solutions that attack the sandbox. As a program: runs them all and prints their outcomes as one line of JSON.

python attacks.py FOLDER MODE   FOLDER: writable for everybody; one attack tries to write into it from inside
                                MODE: of `sandbox.tests`

The environment of this program holds SECRET, and it listens at PORT of this machine and at an abstract Unix address.
"""

import contextlib
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from t2g.sandbox import SandboxConfig, run_solution

LIMITS = SandboxConfig(timeout_s=2.0, cpu_s=4, memory_mib=256, max_processes=8, max_file_mib=1, max_output_kib=16)
TESTS = """from solution import f

def test_one():
    assert f(1) == 2

def test_two():
    assert f(2) == 3
"""
HONEST = "def f(x):\n    return x + 1\n"
SECRET = "hush-hush"
# Passes its tests where `reach` reaches something; N: numbers of processes that may be the caller's or the tests'.
REACH = """
import ctypes, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
try:
    N = [int(n) for n in os.listdir('/proc') if n.isdigit()]
except OSError:
    N = range(max(2, os.getpid() - 2000), os.getpid())  # more would take longer than LIMITS.cpu_s
def reach():
BODY
reached = reach()
def f(x):
    return x + 1 if reached else 0
"""


def reach(body: str) -> str:
    return REACH.replace("BODY\n", "".join(f"    {line}\n" for line in body.splitlines()))


def any_of(call: str, over: str = "N", setup: str = "") -> str:
    """The body of a `reach`: whether `call` succeeds for an n of `over`, which is not this process."""
    return (
        f"{setup}\nfor n in {over}:\n    try:\n        if n != os.getpid() and {call}:\n            return True\n"
        "    except (OSError, ValueError):\n        pass\n"
    )


# name -> (solution, reason of the outcome, error of its last test or ""); "*": any, they depend on the machine
ATTACKS: dict[str, tuple[str, str, str]] = {
    "endless loop": ("def f(x):\n    while True:\n        pass\n", "timeout", "*"),
    "loop that catches everything": (
        "def f(x):\n    while True:\n        try:\n            while True:\n                pass\n"
        "        except BaseException:\n            pass\n",
        "timeout",
        "*",
    ),
    "processor time": ("import threading\ndef f(x):\n    while True:\n        2 ** 99\n", "timeout", "*"),
    "10 GiB": ("def f(x):\n    return bytearray(10 * 2**30)\n", "failed", "MemoryError"),
    "count of processes": (
        "import os, time\ndef f(x):\n    made = 0\n    try:\n        while made < 40:\n            if os.fork() == 0:\n"
        "                time.sleep(60)\n                os._exit(0)\n            made += 1\n"
        "    except OSError:\n        raise ValueError(made)\n    return x + 1\n",
        "failed",
        "ValueError",
    ),
    "write outside": ("def f(x):\n    open('FOLDER/written', 'w').close()\n    return x + 1\n", "failed", "*"),
    "write into the system": ("def f(x):\n    open('/etc/t2g', 'w').close()\n    return x + 1\n", "failed", "*"),
    "large file": ("def f(x):\n    open('big', 'wb').write(bytes(2**21))\n    return x + 1\n", "failed", "OSError"),
    "socket": (
        "import socket\ndef f(x):\n    socket.create_connection(('192.0.2.1', 80), 0.2)\n    return x + 1\n",
        "failed",
        "*",
    ),
    "_exit before": ("import os\nos._exit(0)\n", "exited", "Gone"),
    "_exit inside": ("import os\ndef f(x):\n    os._exit(0)\n", "exited", "Gone"),
    "sys.exit": ("import sys\nsys.exit(0)\n", "failed", "SystemExit"),
    "pytest.exit": ("import pytest\npytest.exit(0)\n", "failed", "Exit"),
    "pytest.skip": ("import pytest\ndef f(x):\n    pytest.skip('later')\n", "failed", "Skipped"),
    "unittest's skip": ("import unittest\ndef f(x):\n    raise unittest.SkipTest\n", "failed", "SkipTest"),
    "daemon": (
        "import os, time\ndef f(x):\n    if x == 1 and os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0:\n            time.sleep(60)\n        os._exit(0)\n    return x + 1\n",
        "left_processes",
        "",
    ),
    "daemon that the solution denies": (
        "import os, time\nif os.fork() == 0:\n    time.sleep(50)\n    os._exit(0)\n"
        "def bad(*a):\n    raise ChildProcessError\nos.waitpid = bad\ndef f(x):\n    return x + 1\n",
        "left_processes",
        "",
    ),
    "daemon that its parent does not adopt": (
        "import ctypes, os, time\nctypes.CDLL(None).prctl(36, 0, 0, 0, 0)\ndef f(x):\n"
        "    if x == 1:\n        child = os.fork()\n        if child == 0:\n            if os.fork() == 0:\n"
        "                time.sleep(50)\n            os._exit(0)\n        os.waitpid(child, 0)\n    return x + 1\n",
        "left_processes",
        "",
    ),
    "flood": ("def f(x):\n    while True:\n        print('x' * 999)\n", "too_much_output", "OSError"),
    "flood of a file descriptor": (
        "import os\ndef f(x):\n    while True:\n        os.write(1, b'x' * 999)\n", "too_much_output", "*",
    ),
    "segmentation fault": ("import ctypes\ndef f(x):\n    ctypes.string_at(0)\n", "killed", "Gone"),
    "kill the group": ("import os\ndef f(x):\n    os.kill(0, 9)\n", "*", "*"),  # init of a namespace survives
    "kill the parent": ("import os\ndef f(x):\n    os.kill(os.getppid() or -1, 9)\n", "*", "*"),
    "stop the parent": ("import os\ndef f(x):\n    os.kill(os.getppid() or -1, 19)\n", "*", "*"),
    # Forging: the output of the runner, its functions, its memory, its result channel.
    "verdict into every file": (
        "import json, os\nsaid = json.dumps({'reason': 'passed', 'tests': []}).encode() + b'\\n'\n"
        "for file in range(64):\n    try:\n        os.write(file, b'[]\\n' + said)\n    except OSError:\n        pass\n"
        "os._exit(0)\n",
        "exited",
        "*",
    ),
    "print and leave": ("import os\nprint('2 passed')\nos._exit(0)\n", "exited", "*"),
    "atexit": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    return 0\n", "failed", "AssertionError",
    ),
    "patched runner": (
        "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('t2g'):\n"
        "        for key, value in list(vars(module).items()):\n            if callable(value) and key != 'Peer':\n"
        "                try:\n                    setattr(module, key, lambda *a, **k: 'passed')\n"
        "                except Exception:\n                    pass\ndef f(x):\n    return 0\n",
        "*",
        "*",
    ),
    "frames": (
        "import sys, gc\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        frame.f_globals['run'] = lambda *a: {'reason': 'passed', 'tests': []}\n        frame = frame.f_back\n"
        "    for found in gc.get_objects():\n        if isinstance(found, dict) and 'reason' in found:\n"
        "            found['reason'] = 'passed'\n    return 0\n",
        "failed",
        "AssertionError",
    ),
    "expected value from memory": (
        "import gc, types\ndef f(x):\n    texts = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        "    known = [v for o in texts for v in list(o.values()) if isinstance(v, str) and 'test_one' in v]\n"
        "    return x + 1 if [text for text in known if 'gc.get' not in text] else None\n",
        "failed",
        "AssertionError",
    ),
    "always equal": (
        "class E:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\ndef f(x):\n    return E()\n",
        "failed",
        "AssertionError",
    ),
    "always equal number": (
        "class E(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
        "def f(x):\n    return E(7)\n",
        "failed",
        "AssertionError",
    ),
    "builtins": (
        "import builtins\nbuiltins.AssertionError = ZeroDivisionError\ndef f(x):\n    return 0\n", "failed", "*",
    ),
    "trace": (
        "import sys\nsys.settrace(lambda *a: os._exit(0))\nimport os\ndef f(x):\n    return 0\n",
        "*",
        "*",
    ),
    "second answer": (
        "import gc, json\nfrom socket import socket\n"
        "ends = [o for o in gc.get_objects() if type(o) is socket]\n"
        "def f(x):\n    note = {'out': '', 'flood': False, 'warnings': []}\n"
        "    reply = json.dumps({'reply': 1, 'changed': [], 'note': note, 'value': True}).encode()\n"
        "    for end in ends:\n        if end.fileno() >= 0:\n"
        "            end.sendall(reply + b'\\n')\n    return 0\n",
        "*",
        "*",
    ),
}  # fmt: skip
# Reaching out: each passes where it reaches what it wants. All numbers of processes below its own are tried.
# name -> (what is tried with an n, of which n, a statement before; reason of the outcome)
TRIES: dict[str, tuple[str, str, str, str]] = {
    "read outside": ("open(n).read() is not None", "['/etc/passwd', 'FOLDER/secret']", "", "failed"),
    "signal another": ("os.kill(n, 0) is None", "range(2, os.getpid())", "", "failed"),
    "be signalled about": (
        "fcntl.fcntl(0, fcntl.F_SETOWN, n) is not None",
        "[os.getppid()] * bool(os.getppid())",
        "import fcntl",
        "failed",
    ),
    "trace the tests": ("libc.ptrace(16, n, 0, 0) == 0", "N", "", "failed"),
    "limits of the tests": (
        "resource.prlimit(n, resource.RLIMIT_CPU, (1, 1))",
        "[os.getppid()] * bool(os.getppid())",
        "",
        "failed",
    ),
    "the supervisor's pipe": (
        "open(n, 'wb').write(b'[]\\n{\"reason\": \"passed\"}\\n')",
        "[f'/proc/{n}/fd/{end}' for n in N for end in range(16) if n != os.getpid()]",
        "",
        "failed",
    ),
    "connect to this machine": ("socket.create_connection(('127.0.0.1', n), 1)", "[PORT]", "", "failed"),
}
READS_SECRET = f"{SECRET!r} in open(f'/proc/{{n}}/environ', errors='replace').read()"
TRIES["environments"] = (READS_SECRET, "N", "", "failed")
# name -> (body of `reach`; reason of the outcome)
BODIES: dict[str, tuple[str, str]] = {
    "kill everybody": ("os.kill(-1, 9)", "*"),
    "connect to an abstract address": (
        "end = socket.socket(socket.AF_UNIX)\nreturn end.connect('\\0t2g-attacks-PORT') is None",
        "failed",
    ),
    "send a datagram": ("return socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))", "failed"),
    "datagrams of a pair": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nreturn a.sendto(b'x', 'FOLDER/listens')",
        "failed",
    ),
    "datagrams to an abstract address": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nreturn a.sendto(b'x', '\\0t2g-listens-PORT')",
        "failed",
    ),
    "packets of a pair": ("a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\nreturn True", "failed"),
    "a sibling by clone": (
        "number = 56 if os.uname().machine == 'x86_64' else 220\n"
        "child = libc.syscall(number, 0x8000 | 17, 0, 0, 0, 0)\n"
        "if child == 0:\n    signal.pause()\nreturn child > 0",
        "failed",
    ),
    "a sibling that shares memory": (
        "number = 56 if os.uname().machine == 'x86_64' else 220\n"
        "return libc.syscall(number, 0x8000 | 0x4000 | 17, 0, 0, 0, 0) >= 0 and (os.getpid() or True)",
        "failed",
    ),
    "a sibling with a thread's files": (
        "number = 56 if os.uname().machine == 'x86_64' else 220\n"
        "return libc.syscall(number, 0x8000 | 0x400 | 17, 0, 0, 0, 0) >= 0",
        "failed",
    ),
    "mode of the output": (
        "before = os.fstat(2).st_mode\nos.fchmod(2, 0o4777)\nreturn os.fstat(2).st_mode != before",
        "failed",
    ),
    "mode of a copy of the output": (
        "copy = os.dup(2)\nbefore = os.fstat(copy).st_mode\nos.fchmod(copy, 0o4777)\n"
        "return os.fstat(copy).st_mode != before",
        "failed",
    ),
    "attributes of the output": ("os.setxattr(2, 'user.a', b'x')\nreturn os.getxattr(2, 'user.a') == b'x'", "failed"),
    "shared memory of System V": ("return libc.shmget(0, 2**27, 0o1600) >= 0", "failed"),
    "memory in a file of none": ("return os.memfd_create('x') >= 0", "failed"),
    "io_uring": ("return libc.syscall(425, 8, ctypes.create_string_buffer(128)) >= 0", "failed"),
    "nested namespace": ("return libc.unshare(0x10000000) == 0", "failed"),
    "key ring": ("return libc.syscall(250 if os.uname().machine == 'x86_64' else 219, 0, -3, 1) >= 0", "failed"),
    "mode of a file": (
        "os.chmod('FOLDER/mine', 0o777)\nreturn os.stat('FOLDER/mine').st_mode & 0o777 == 0o777",
        "failed",
    ),
    "folders that cannot be removed": (
        "os.makedirs('a/b')\nos.mkdir('a/b/c', 0)\nos.chmod('a', 0)\n"
        "for _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')",
        "failed",
    ),
    "memory in all": (
        "ends = []\nfor _ in range(5):\n    out, into = os.pipe()\n    child = os.fork()\n    if child == 0:\n"
        "        held = b'x' * (150 * 2**20)\n        os.write(into, b'x')\n        signal.pause()\n"
        "    os.close(into)\n    ends.append((out, child))\nheld = [os.read(out, 1) for out, _ in ends]\n"
        "for _, child in ends:\n    os.kill(child, 9)\n    os.waitpid(child, 0)\nreturn all(held)",
        "*",
    ),
}
for attack, (call, over, before, expected_reason) in TRIES.items():
    ATTACKS[attack] = (reach(any_of(call, over, before)), expected_reason, "*")
for attack, (body, expected_reason) in BODIES.items():
    ATTACKS[attack] = (reach(body), expected_reason, "*")
# Last, and only after "count of processes" was seen to be limited.
BOMB = "import os\ndef f(x):\n    while True:\n        os.fork()\n"


def left_behind(seconds: float) -> list[str]:
    """Return processes of sandboxes that were started from here. What was killed may take some of `seconds` to end on a
    busy machine; what was not, stays for longer.
    """
    deadline = time.monotonic() + seconds
    while (alive := _alive()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def sandbox_processes() -> list[Path]:
    """Return /proc folders of forks of this process's server: they have its command line, which names this process."""
    mark = f'"caller": {os.getpid()}}}'.encode()
    folders = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark in file.read_bytes() and f"PPid:\t{os.getpid()}\n" not in file.with_name("status").read_text():
                folders.append(file.parent)
    return folders


def _alive() -> list[str]:
    return [folder.name for folder in sandbox_processes()]


def limits_of(name: str) -> SandboxConfig:
    """What ends by itself has time to, however busy the machine: else it would be out of time before it is caught."""
    ends = name == "honest" or (name in ATTACKS and ATTACKS[name][1] not in ("timeout", "*"))
    return LIMITS.model_copy(update={"timeout_s": 15.0}) if ends else LIMITS


def main(folder: str, mode: str) -> None:
    assert os.environ["SECRET"] == SECRET
    port = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    number = str(port.getsockname()[1])
    abstract.bind(f"\0t2g-attacks-{number}")
    abstract.listen()
    datagrams = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    datagrams[0].bind(f"{folder}/listens")
    os.chmod(f"{folder}/listens", 0o777)
    datagrams[1].bind(f"\0t2g-listens-{number}")
    for name in ("secret", "mine"):
        Path(folder, name).write_text(SECRET)
        Path(folder, name).chmod(0o600)
    codes = {name: code.replace("FOLDER", folder).replace("PORT", number) for name, (code, _, _) in ATTACKS.items()}
    codes["honest"] = HONEST

    def attack(name: str, code: str) -> dict[str, Any]:
        return asdict(run_solution(code, TESTS, limits_of(name).model_copy(update={"tests": mode})))

    with ThreadPoolExecutor(2) as pool:
        outcomes = dict(zip(codes, pool.map(attack, codes, codes.values()), strict=True))
    limited = any(test["error"] == "ValueError" for test in outcomes["count of processes"]["tests"])
    if limited:
        outcomes["fork bomb"] = attack("fork bomb", BOMB)
    print(json.dumps({"uid": os.getuid(), "limited": limited, "outcomes": outcomes, "left": left_behind(10)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
