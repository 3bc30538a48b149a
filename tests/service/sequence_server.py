"""A server with a SequenceBuffer, as a process that tests kill.

    python tests/service/sequence_server.py ADDRESS OPTIONS

It prints its address, and ends when its standard input does. With ``stats`` on the input it prints the buffer's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import sharpwave as sw

__all__ = ["FLOW", "Server", "new_endpoint"]

FLOW = sw.Dataflow([sw.Consumer("ref", {"x"}, {"y"}, 2), sw.Consumer("train", {"x", "y"}, batch_size=2)])


def new_endpoint(transport: str) -> str:
    return "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{tempfile.mkdtemp(prefix='sw-')}/server"


class Server:
    """The other process, for a test."""

    def __init__(self, endpoint: str, client_timeout: float = 5.0, folder: str | None = None, **options: Any) -> None:
        self._words = [endpoint, json.dumps({"client_timeout": client_timeout, "folder": folder, **options})]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *self._words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the server has not started"
        self._words[0] = self.address  # once more: at the same place

    @property
    def table(self) -> str:
        return f"{self.address}/seq"

    def stats(self) -> dict[str, Any]:
        """Of the buffer, as its own process sees it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("stats\n")
        self.process.stdin.flush()
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        self._end()

    def _end(self) -> None:
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    address, text = sys.argv[1:]
    options = json.loads(text)
    serving = {name: options.pop(name) for name in ("client_timeout", "folder")}
    if "limits" in options:
        serving["limits"] = options.pop("limits")
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a last record that a kill has cut
        seq = sw.SequenceBuffer(options.pop("capacity", 100), flow=FLOW, **options)
    with sw.serve({"seq": seq}, address, **serving) as server:
        print(server.address, flush=True)
        for _ in sys.stdin:
            told = seq.stats()
            told["staleness"] = {str(name): value for name, value in told["staleness"].items()}
            told["clients"] = len(server.stats()["clients"])
            print(json.dumps(told), flush=True)
    seq.close()


if __name__ == "__main__":
    main()
