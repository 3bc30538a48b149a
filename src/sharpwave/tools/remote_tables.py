"""Tables of a server, for ``sharpwave ls`` and ``sharpwave rm`` with an address of the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = ["print_tables", "remove"]


def print_tables(address: str, keys: Path | None, as_json: bool, timeout_s: float) -> None:
    """Prints the tables of a server with face, size and capacity."""
    from sharpwave.service.session import list_tables

    tables = list_tables(address, keys=keys, timeout=timeout_s)
    if as_json:
        print(json.dumps(tables, indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    shown = Table("address", "face", box=None, pad_edge=False)
    for name in ("size", "capacity"):
        shown.add_column(name, justify="right", no_wrap=True)
    for table in tables:
        capacity = table["capacity"]
        shown.add_row(
            f"{address.rstrip('/')}/{table['name']}",
            table["face"],
            f"{table['size']:,}",
            "-" if capacity is None else f"{capacity:,}",
        )
    # Lines that another program reads are never wrapped.
    Console(width=None if sys.stdout.isatty() else 1_000).print(shown, highlight=False, markup=False)


def remove(address: str, keys: Path | None, timeout_s: float) -> None:
    """Asks the server to close a table and to remove its storage; the key needs the role admin."""
    from sharpwave.service.session import remove_table

    remove_table(address, keys=keys, timeout=timeout_s)
