"""A process that has imported an engine, from which hosts of engines are forked: each of them is spared the import.

    python -P template.py SOCKET MODULE…

An order is one message on the socket, {"words": [program, argument, …], "environment": {…}}, with descriptors: those
that the program is given, as its last arguments; a log for its output; a pipe, to which its pid is written, and its
exit code when it has ended. The program runs as `python -P program …` would, but for what is imported already and the
seed of `hash()`. The process ends with its socket; its children go on.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import socket
import sys
import traceback
from pathlib import Path

MESSAGE_BYTES_MAX = 1 << 17
DESCRIPTORS_MAX = 8


def serve(orders: socket.socket) -> list[str]:
    """Fork for every order. Returns the program and its arguments in each child; ends here when there are no more."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the child, and the pipe that its end is told
    while True:
        ready, _, _ = select.select([orders, *running], [], [])
        for pidfd in set(ready) & set(running):
            pid, told = running.pop(pidfd)
            _, status = os.waitpid(pid, 0)
            tell(told, os.waitstatus_to_exitcode(status))
            os.close(told)
            os.close(pidfd)
        if orders in ready:
            message, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
            if not message:
                sys.exit(0)
            *given, log, told = descriptors
            if pid := os.fork():
                running[os.pidfd_open(pid)] = pid, told
                for descriptor in (*given, log):
                    os.close(descriptor)
                continue
            orders.close()
            for pidfd, (_, other) in running.items():
                os.close(pidfd)
                os.close(other)
            return become(json.loads(message), given, log, told)


def become(order: dict[str, object], given: list[int], log: int, told: int) -> list[str]:
    """Make the child what a new process would be: a session, an environment, standard streams."""
    os.setsid()
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, stream)
    environment, words = order["environment"], order["words"]
    assert isinstance(environment, dict) and isinstance(words, list)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    for descriptor in given:
        os.set_inheritable(descriptor, True)  # as those of a new process are
    tell(told, os.getpid())
    os.close(told)
    return [*words, *map(str, given)]


def tell(pipe: int, number: int) -> None:
    try:
        os.write(pipe, b"%d\n" % number)
    except BrokenPipeError:
        pass  # nobody waits any more


if __name__ == "__main__":
    # A program that is run has its own folder on the path, with -P or without.
    for module in sys.argv[2:]:
        importlib.import_module(module)
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
