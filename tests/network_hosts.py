"""Hosts of their own on one machine: each has a network, a host name, processes, /dev/shm and /tmp/ray of its own.

A host is a set of namespaces around one holder process. A bridge in a further network namespace connects them; no
interface of the machine takes part. Whatever ends this process ends the holders, and with a holder the kernel ends all
processes, mounts and interfaces of its host.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

NETWORK = "10.77.0"
START_S = 30
SHM_MIB = 512
# What makes the holder's child end with the holder, and the holder with this process.
HOLDER = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child")
ENDING = ("--net", "--pid", "--mount-proc")  # the end of the first process ends all others
HOLD = "echo ready; while :; do sleep 3600 & wait $!; done"  # a shell also waits for orphans
SET_UP = """
set -e
hostname {name}
mount -t tmpfs -o size={shm_mib}m tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount --bind {names} /etc/hosts
ip link set lo up
"""


def find_obstacle() -> str:
    """Return why this machine cannot make hosts, "" if it can."""
    probe = "ip link add probe type bridge && mount -t tmpfs tmpfs /mnt"
    try:
        done = subprocess.run(
            ["unshare", *ENDING, "--fork", "sh", "-c", probe],
            capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return done.stderr.strip() if done.returncode else ""


class HostError(Exception):
    """A program on a host failed; the message is its output."""


class Holder:
    """A process that keeps namespaces alive: of network and processes, and others."""

    def __init__(self, *namespaces: str, script: str) -> None:
        command = [*HOLDER, *ENDING, *namespaces, "bash", "-c", f"{script}\n{HOLD}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == b"ready\n", f"the namespaces of a host were not made: {command}"
        (self._child,) = psutil.Process(self._process.pid).children()
        self.pid = self._child.pid

    def end(self) -> None:
        """Kill every process in the namespaces. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._child.wait(timeout=START_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


@dataclass(kw_only=True)
class Host:
    """A host with the address `NETWORK.number`; its programs run with `environ`."""

    name: str
    number: int
    environ: Mapping[str, str]
    logs: Path
    holder: Holder

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def command(self, *words: object) -> list[str]:
        enter = ["nsenter", "--target", str(self.holder.pid), "--net", "--mount", "--uts", "--pid"]
        return [*enter, f"--wd={Path.cwd()}", "--", *map(str, words)]

    def run(self, *words: object, timeout_s: float) -> str:
        """Return the output of a program, which must succeed."""
        done = subprocess.run(
            self.command(*words), env=dict(self.environ), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        output = done.stdout + done.stderr
        if done.returncode:
            raise HostError(output)
        return output

    def start(self, *words: object) -> "subprocess.Popen[bytes]":
        """Start a program, its output in `logs`; it ends with the host."""
        with self.logs.open("ab") as log:
            return subprocess.Popen(
                self.command(*words), env=dict(self.environ), stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def python(self, *words: object) -> "subprocess.Popen[bytes]":
        return self.start(sys.executable, *words)


@dataclass(kw_only=True)
class Network:
    """Hosts on one bridge."""

    folder: Path
    environ: Mapping[str, str]
    switch: Holder
    hosts: dict[str, Host] = field(default_factory=dict)

    def add(self, name: str, number: int, *, shm_mib: int = SHM_MIB) -> Host:
        """Start a host; one of this name must have been killed."""
        names = self.folder / f"hosts-{name}"
        names.write_text(f"127.0.0.1 localhost\n{NETWORK}.{number} {name}\n")
        script = SET_UP.format(name=name, shm_mib=shm_mib, names=names)
        holder = Holder("--mount", "--uts", script=script)
        self.hosts[name] = Host(
            name=name, number=number, environ=self.environ, logs=self.folder / f"{name}.log", holder=holder
        )
        host = self.hosts[name]
        self._on_switch(f"ip link add name port-{name} type veth peer name eth0 netns {holder.pid}")
        self._on_switch(f"ip link set port-{name} master bridge")
        self.connect(name)
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0", timeout_s=START_S)
        host.run("ip", "link", "set", "eth0", "up", timeout_s=START_S)
        return host

    def cut(self, name: str) -> None:
        """Unplug a host: packets from and to it are lost."""
        self._on_switch(f"ip link set port-{name} down")

    def connect(self, name: str) -> None:
        self._on_switch(f"ip link set port-{name} up")

    def kill(self, name: str) -> None:
        """End a host as a power failure does: nobody learns of it."""
        self._on_switch(f"ip link delete port-{name}")
        self.hosts.pop(name).holder.end()

    def list_namespaces(self) -> set[str]:
        """Return the network namespaces of the hosts and of the bridge."""
        holders = [self.switch, *(host.holder for host in self.hosts.values())]
        return list_namespaces(holder.pid for holder in holders)

    def close(self) -> None:
        """End every host."""
        for host in self.hosts.values():
            host.holder.end()
        self.hosts.clear()
        self.switch.end()

    def _on_switch(self, command: str) -> None:
        enter = ["nsenter", "--target", str(self.switch.pid), "--net", "--", *command.split()]
        subprocess.run(enter, check=True, capture_output=True, timeout=START_S)


@contextmanager
def make_network(folder: Path, environ: Mapping[str, str]) -> Iterator[Network]:
    """Yield a network without hosts; it ends with the block.

    Args:
        folder: For logs; every host sees it at the same path.
    """
    script = "set -e; ip link add bridge type bridge; ip link set bridge up"
    with ExitStack() as stack:
        switch = Holder(script=script)
        network = Network(folder=folder, environ=environ, switch=switch)
        stack.callback(network.close)
        yield network


def list_namespaces(pids: Iterable[int]) -> set[str]:
    """Return the network namespaces of processes, without that of this one. Processes that have ended have none."""
    own_namespace = Path("/proc/self/ns/net").readlink()
    namespaces: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            namespace = Path(f"/proc/{pid}/ns/net").readlink()
            namespaces.add(namespace)
    return {str(namespace) for namespace in namespaces - {own_namespace}}


def find_left(namespaces: set[str]) -> list[int]:
    """Return the processes that are in one of these network namespaces."""
    return [pid for pid in psutil.pids() if list_namespaces([pid]) & namespaces]
