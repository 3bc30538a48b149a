"""Serves one buffer of trajectories, "live", until its stdin ends.

``python trajectory_server.py ADDRESS FOLDER OPTIONS``: FOLDER is "-" for a buffer in memory. OPTIONS is JSON:
``buffer`` and ``serve``, the keywords of the two. It prints the address.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["ServerProcess"]


class ServerProcess:
    """The program below as a process. ``kill`` and ``start`` may follow each other; the address stays the same."""

    def __init__(self, address: str, folder: Path | None, **options: Any) -> None:
        self.address, self._folder, self._options = address, folder, options
        self.start()

    def start(self) -> None:
        arguments = [self.address, "-" if self._folder is None else str(self._folder), json.dumps(self._options)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the server did not start"

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._end()

    def _end(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    import sharpwave as sw

    address, folder, text = sys.argv[1:]
    options = json.loads(text)
    with (
        sw.TrajectoryReplayBuffer(None if folder == "-" else folder, **options.get("buffer", {})) as buffer,
        sw.serve({"live": buffer}, address, **options.get("serve", {})) as server,
    ):
        print(server.address, flush=True)
        os.read(0, 1)


if __name__ == "__main__":
    main()
