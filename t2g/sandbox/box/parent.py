"""Process that imports pytest once; every sandbox is a fork of it.

It reads limits and paths only. Code and tests go through a pipe to the fork, so that no run finds the data of another
run in the memory that it inherits. README.md lists what a fork inherits.
"""

import contextlib
import gc
import json
import os
import socket
import tempfile

from t2g.sandbox.box import isolation, supervisor, tester


def serve() -> None:
    """Fork a supervisor for each request on descriptor 0, until the caller closes the other end.

    A request is JSON (see `supervisor.main`) with four descriptors: standard input, output and error of the sandbox,
    and a socket for the answer. The answer carries a descriptor of the supervisor's process.
    """
    control = socket.socket(fileno=0)
    session = tester.prepare_session()
    with contextlib.suppress(ImportError):
        import numpy.random

        os.register_at_fork(after_in_child=numpy.random.seed)  # else the solution could predict the tests' numbers
    isolation.set_dumpable(False)
    gc.freeze()  # a collection in a fork would copy every page
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 2**16, 4)
        if not request:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        child = os.fork()
        if child == 0:
            try:
                for target, descriptor in enumerate(descriptors[:3]):  # 0 was the control socket
                    os.dup2(descriptor, target)
                os.closerange(3, 64)
                tempfile.tempdir = None
                supervisor.main(json.loads(request), session)
            finally:
                os._exit(1)
        process = os.pidfd_open(child)
        with socket.socket(fileno=descriptors.pop()) as answer, contextlib.suppress(OSError):
            socket.send_fds(answer, [b"started"], [process])
        for descriptor in [*descriptors, process]:
            os.close(descriptor)
