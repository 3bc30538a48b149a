"""Starts processes of a run by forking one that has imported everything.

A line of standard input is {"folder": ..., "role": ..., "output": ...}; the answer is {"pid": ...}. Importing torch
takes seconds, a fork milliseconds: a process that died is back at once. This process has one thread and no event loop,
so nothing is lost in the fork. It ends with its standard input; the processes that it started go on.
"""

from __future__ import annotations

import json
import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    import contextlib

    from ...service.zeromq import zmq_functions
    from . import roles

    zmq_functions()  # imports pyzmq, and makes no thread
    with contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: F401 (every optimizer imports it, which takes seconds)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the keeper's
    for line in sys.stdin:
        said = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(said["output"])
            roles.main(said["folder"], said["role"])
        print(json.dumps({"pid": pid}), flush=True)


def _become(output: str) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(null)
    os.close(file)
