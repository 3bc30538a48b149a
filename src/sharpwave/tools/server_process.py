"""``sharpwave serve``: a server as a process of its own, from its first line to its last."""

from __future__ import annotations

import contextlib
import dataclasses
import select
from pathlib import Path
from typing import Any

import sharpwave as sw

from .process_life import BadStart, stop_signals
from .server_config import ServerConfig

__all__ = ["BadStart", "read_config", "run_server"]

_LOOK_S = 1.0


def read_config(what: list[str], at: str | None, keys: str | None) -> ServerConfig:
    """The configuration of a command line: one file ``CONFIG.toml``, whose ``at`` and ``keys`` the options replace; or
    addresses.

    Raises:
        BadStart: Something in it is wrong.
    """
    try:
        if len(what) == 1 and what[0].endswith(".toml"):
            config = ServerConfig.read(Path(what[0]))
            return dataclasses.replace(config, at=at or config.at, keys=keys or config.keys)
        if at is None:
            raise sw.errors.SchemaError("serve: expected --at tcp://host:port, or a file CONFIG.toml that says it")
        return ServerConfig.from_addresses(what, at, keys)
    except sw.errors.SharpwaveError as error:
        raise BadStart(f"{type(error).__name__}: {error}") from None


def run_server(config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT, then ends in order.

    The first line of standard output is the address that it listens on; a port 0 is replaced by the real one. At the
    first signal no new call is taken, running calls end within ``drain_s``, and the buffers are flushed and closed. A
    second signal ends the process at once, as a kill does.

    Raises:
        BadStart: It could not begin. Nothing is open.
    """
    with contextlib.ExitStack() as ends:
        try:
            buffers = {name: _open(ends, table.make()) for name, table in config.tables.items()}
            server = sw.serve(buffers, config.at, keys=config.keys, **config.options)
        except (sw.errors.SharpwaveError, OSError) as error:
            raise BadStart(f"{type(error).__name__}: {error}") from None
        with stop_signals() as stopped:
            try:
                print(server.address, flush=True)
                while not select.select([stopped], [], [], _LOOK_S)[0]:
                    if not server.is_running:  # its thread has told why on standard error; a supervisor starts another
                        raise sw.errors.StorageError(f"serve: the server at {server.address} failed")
            finally:
                server.close(drain_s=config.drain_s)


def _open(ends: contextlib.ExitStack, buffer: Any) -> Any:
    ends.callback(buffer.close)
    ends.callback(buffer.flush)  # runs before close: a write that fails is told
    return buffer
