"""The `sharpwave` command."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import sharpwave as sw
from sharpwave.address import is_remote
from sharpwave.tools import generate_commands, key_commands, remote_tables, segments, train_commands, trajectories
from sharpwave.tools.watch import format_pids, watch_segment

if TYPE_CHECKING:
    import typer

# Modules that the command line needs and `import sharpwave` does not. If another module is missing, that is a bug of
# ours, and the traceback is shown.
EXTRA_MODULES = frozenset(
    {
        "gymnasium",
        "h5py",
        "httpx",
        "jinja2",
        "matplotlib",
        "minari",
        "rich",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "typer",
        "uvicorn",
        "zmq",
    }
)


def build_app() -> "typer.Typer":
    """Returns the Typer application.

    Typer is an optional dependency. It is imported here so that `main` can say how to install it.
    """
    import typer

    app = typer.Typer(
        name="sharpwave",
        help="Experience replay for reinforcement learning.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
        ] = False,
    ) -> None:
        pass

    @app.command()
    def demo(
        steps: Annotated[int, typer.Option(min=1, help="Environment steps to train for.")] = 15_000,
        seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the results.")] = Path("sharpwave-demo"),
    ) -> None:
        """Train DQN on CartPole-v1 by prioritized 3-step replay and plot its learning curve."""
        from sharpwave.tools.demo import run_demo

        run_demo(steps=steps, seed=seed, out=out)

    key_option = typer.Option("--keys", help="Your file NAME.key, for a server with keys.")
    timeout_option = typer.Option(min=0, help="Seconds to wait for a server.")

    @app.command()
    def info(
        address: Annotated[
            str,
            typer.Argument(
                help="A saved buffer's path, a folder of trajectories, shm:// or file:// storage, or a server's table."
            ),
        ],
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
        keys: Annotated[Path | None, key_option] = None,
        watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C, without opening it.")] = False,
        interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks of --watch.")] = 1.0,
        count: Annotated[int | None, typer.Option(min=1, help="End --watch after this many looks.")] = None,
    ) -> None:
        """Show the numbers of a saved or live buffer, or of a folder of trajectories."""
        if watch:
            watch_segment(address, interval, count, as_json)
        elif count is not None:
            raise typer.BadParameter("it counts the looks of --watch; give --watch too", param_hint="--count")
        elif Path(address).is_dir():
            trajectories.print_info(Path(address), as_json)
        else:
            _print_info(address, as_json, keys)

    source_option = typer.Option("--source-path", help="Where the trajectories are.")
    save_option = typer.Option("--save-path", help="The folder to make.")
    copy_option = typer.Option("--copy", help="Leave the source as it is; otherwise trajectories are moved.")
    dry_option = typer.Option("--dry-run", help="Print what would be done, and change nothing.")
    pickle_option = typer.Option("--allow-pickle", help="Trust pkl files: loading one may run any code.")

    @app.command()
    def merge(
        save_path: Annotated[Path, save_option],
        source_path: Annotated[Path, source_option] = Path("."),
        copy: Annotated[bool, copy_option] = False,
        order: Annotated[
            str, typer.Option(help="Order of ranks: numeric, or string as in RLinf (rank_10 before rank_2).")
        ] = "numeric",
        dry_run: Annotated[bool, dry_option] = False,
        allow_pickle: Annotated[bool, pickle_option] = False,
    ) -> None:
        """Merge the rank_* folders of the source into one folder of trajectories, in the order of their ids."""
        trajectories.run_merge(source_path, save_path, copy, order, dry_run, allow_pickle)

    @app.command()
    def split(
        save_path: Annotated[Path, save_option],
        split_count: Annotated[int, typer.Option(help="Number of trajectories to take, from the first.")],
        source_path: Annotated[Path, source_option] = Path("."),
        copy: Annotated[bool, copy_option] = False,
        dry_run: Annotated[bool, dry_option] = False,
        allow_pickle: Annotated[bool, pickle_option] = False,
    ) -> None:
        """Make a folder with the first trajectories of another folder."""
        trajectories.run_split(source_path, save_path, split_count, copy, dry_run, allow_pickle)

    @app.command()
    def convert(
        source: Annotated[
            str, typer.Argument(help="A folder of trajectories, a saved or live ReplayBuffer, or minari:NAME.")
        ],
        target: Annotated[str, typer.Argument(help="A new folder, a new file FILE.sw, or minari:NAME.")],
        storage_format: Annotated[str | None, typer.Option("--format", help="Of the files: pt or safetensors.")] = None,
        allow_pickle: Annotated[bool, pickle_option] = False,
    ) -> None:
        """Convert a Minari data set to a folder of trajectories or to a saved ReplayBuffer (FILE.sw), one of these to a
        data set, or a folder's file format."""
        trajectories.run_convert(source, target, storage_format, allow_pickle)

    @app.command()
    def ls(
        server: Annotated[str | None, typer.Argument(help="tcp://host:port or ipc://path: list its tables.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
        keys: Annotated[Path | None, key_option] = None,
        timeout: Annotated[float, timeout_option] = 5.0,
    ) -> None:
        """List every buffer in shared memory, and the processes that have it open; or the tables of a server."""
        if server is None:
            _print_segments(as_json)
        elif is_remote(server):
            remote_tables.print_tables(server, keys, as_json, timeout)
        else:
            raise typer.BadParameter(f"expected tcp://host:port or ipc://path, got {server!r}", param_hint="SERVER")

    @app.command()
    def rm(
        addresses: Annotated[
            list[str],
            typer.Argument(metavar="ADDRESS...", help="shm://name, file://path or tcp://host:port/name."),
        ],
        keys: Annotated[Path | None, key_option] = None,
        timeout: Annotated[float, timeout_option] = 5.0,
    ) -> None:
        """Remove live buffers and the files that killed processes left of them. Does not ask."""
        if not _remove(addresses, keys, timeout):
            raise typer.Exit(1)

    @app.command()
    def serve(
        what: Annotated[
            list[str], typer.Argument(metavar="CONFIG.toml | ADDRESS...", help="A configuration; or [NAME=]ADDRESS.")
        ],
        at: Annotated[
            str | None, typer.Option("--at", help="Where to listen: tcp://host:port (0: any free port) or ipc://path.")
        ] = None,
        keys: Annotated[Path | None, typer.Option("--keys", help="The folder that 'sharpwave keys new' made.")] = None,
    ) -> None:
        """Serve buffers to other processes and machines until SIGTERM or Ctrl-C.

        The first line printed is the address. Exit code 2: it could not begin.
        """
        from sharpwave.tools.server_process import BadStart, read_config, run_server

        try:
            run_server(read_config(what, at, None if keys is None else str(keys)))
        except BadStart as error:
            _complain(str(error))
            raise typer.Exit(2) from None

    train_commands.add_commands(app)
    app.add_typer(key_commands.build_app(), name="keys")
    app.add_typer(generate_commands.build_app(), name="generate")
    return app


def main() -> None:
    """Runs the command line; on an error of the user it prints one line to stderr and exits with code 1."""
    try:
        build_app()()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA_MODULES:
            raise
        extras = {"demo": "demo", "convert": "cli,gym", "serve": "cli,serve", "keys": "cli,serve"}
        trains = dict.fromkeys(("train", "resume", "evaluate", "status", "stop"), "demo,llm")
        extra = {**extras, **trains, "generate": "cli,llm"}.get((sys.argv[1:2] or [""])[0], "cli")
        _fail(f'this command needs {missing}, which is not installed: pip install "sharpwave[{extra}]"')
    except (sw.errors.SharpwaveError, OSError) as error:
        _fail(f"{type(error).__name__}: {error}")


def _complain(message: str) -> None:
    print(f"sharpwave: {message}", file=sys.stderr)


def _fail(message: str) -> None:
    _complain(message)
    raise SystemExit(1)


def _print_version(wanted: bool) -> None:
    import typer

    if wanted:
        print(f"sharpwave {sw.__version__}")
        raise typer.Exit


def _print_info(address: str, as_json: bool, keys: Path | None) -> None:
    buffer = sw.open(address, keys=keys) if is_remote(address) else sw.open(address)
    try:
        has_rows = isinstance(buffer, (sw.ReplayBuffer, sw.DistillationBuffer))
        stats = buffer.stats(huge_pages=True) if has_rows else buffer.stats()
    finally:
        buffer.close()
    if as_json:
        print(json.dumps(stats, indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("field")
    table.add_column("value", justify="right")
    for name, value in stats.items():
        table.add_row(name, _format(value))
    console = Console()
    console.print(
        address, highlight=False, markup=False, soft_wrap=True
    )  # not the table's title, which would wrap in a narrow table
    console.print(table)


def _print_segments(as_json: bool) -> None:
    found = list(segments.find())
    if as_json:
        print(json.dumps([dataclasses.asdict(entry) for entry in found], indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("address", "face", box=None, pad_edge=False)
    for name in ("rows", "capacity", "bytes", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("open in")
    for entry in found:
        if isinstance(entry, segments.Damaged):
            table.add_row(entry.address, "-", "-", "-", "-", "-", entry.problem)
            continue
        numbers = f"{entry.size:,}", f"{entry.capacity:,}", _format_bytes(entry.allocated_bytes), _format_s(entry.age_s)
        table.add_row(entry.address, entry.face, *numbers, format_pids(entry.pids) or "no process")
    # Lines that another program reads are never wrapped.
    Console(width=None if sys.stdout.isatty() else 1_000).print(table, highlight=False, markup=False)


def _remove(addresses: list[str], keys: Path | None, timeout_s: float) -> bool:
    """Removes each buffer; returns whether all could be removed."""
    went_well = True
    for address in addresses:
        try:
            if is_remote(address):
                remote_tables.remove(address, keys, timeout_s)
                print(f"removed {address}")
                continue
            removed = segments.remove(address)
        except OSError as error:
            _complain(f"{type(error).__name__}: {error}")
            went_well = False
            continue
        print(f"removed {address}" + (f"; still mapped in {format_pids(removed.pids)}" if removed.pids else ""))
    return went_well


def _format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"


def _format_s(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)
