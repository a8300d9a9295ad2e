"""Stand-ins for slurmd and srun: `slurm_nodes.py slurmd` runs on each node, `slurm_nodes.py srun ...` in a job.

T2G_NODES holds the addresses of each component as JSON. A program's output comes back over its connection; SIGTERM of
srun ends the programs, and so does the end of srun.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

PORT = 6818
END_S = 60
EXIT_MARK = b"\0exit "


# ------------------------------------------------------------------------------------------------------------- a node
def serve() -> None:
    """Run programs until the end of the node."""
    with socket.create_server(("", PORT)) as server:
        print("slurmd", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=run_program, args=(connection,), daemon=True).start()


def run_program(connection: socket.socket) -> None:
    """Run one program; its client ends it by the end of what it sends."""
    with connection, connection.makefile("rb") as received:
        step = json.loads(received.readline())
        process = subprocess.Popen(
            step["command"], cwd=step["folder"], env=step["environ"], stdin=subprocess.DEVNULL, stdout=connection,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

        def end_with_client() -> None:
            with suppress(OSError):
                received.read()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # as slurmd, to all processes of the step

        threading.Thread(target=end_with_client, daemon=True).start()
        code = process.wait()
        with suppress(OSError):
            # Processes that it has left may still write: the code has a line of its own.
            connection.sendall(b"%s%d\n" % (EXIT_MARK, code))


# --------------------------------------------------------------------------------------------------------------- srun
def srun(words: list[str]) -> int:
    """Run a program on each node of a component; return the largest exit code."""
    options = [word for word in words if word.startswith(("--het-group=", "--cpus-per-task="))]
    component = options[0].partition("=")[2]
    step = {"command": words[len(options) :], "folder": os.getcwd(), "environ": dict(os.environ)}
    addresses = json.loads(os.environ["T2G_NODES"])[component]
    connections = [socket.create_connection((address, PORT), timeout=END_S) for address in addresses]

    def on_signal(*_: object) -> None:
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    signal.signal(signal.SIGTERM, on_signal)
    for connection in connections:
        connection.settimeout(None)
        connection.sendall(json.dumps(step).encode() + b"\n")
    codes: list[int] = []
    threads = [threading.Thread(target=print_output, args=(connection, codes)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)  # short, so that the signal is seen
    return max(map(abs, codes), default=1)


def print_output(connection: socket.socket, codes: list[int]) -> None:
    """Copy a program's output to ours, and append its exit code."""
    with connection, connection.makefile("rb") as received:
        for line in received:
            text, _, code = line.partition(EXIT_MARK)
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
            if code:
                codes.append(int(code))


if __name__ == "__main__":
    if sys.argv[1] == "slurmd":
        serve()
    sys.exit(srun(sys.argv[2:]))
