"""The `sharpwave` command."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import sharpwave as sw

if TYPE_CHECKING:
    import typer

# Every module that the command line needs and `import sharpwave` does not. One that is missing and not listed
# here is a defect of ours, and its traceback is wanted.
EXTRA_MODULES = frozenset({"gymnasium", "matplotlib", "rich", "torch", "typer"})


def build_app() -> "typer.Typer":
    """Returns the Typer application.

    Typer is an extra and is imported here, not above: `main` can then say how to install it.
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
        seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
        out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the results.")] = Path("sharpwave-demo"),
    ) -> None:
        """Train DQN on CartPole-v1 by prioritized 3-step replay and plot its learning curve."""
        from sharpwave.tools.demo import run_demo

        run_demo(steps=steps, seed=seed, out=out)

    @app.command()
    def info(
        address: Annotated[str, typer.Argument(help="A saved buffer's path, or shm:// or file:// storage.")],
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    ) -> None:
        """Show what a saved buffer or a live storage holds."""
        _print_info(address, as_json)

    return app


def main() -> None:
    """Runs the command line; a user's mistake ends in one line on stderr and exit code 1."""
    try:
        build_app()()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA_MODULES:
            raise
        extra = "demo" if sys.argv[1:2] == ["demo"] else "cli"
        _fail(f'this command needs {missing}, which is not installed: pip install "sharpwave[{extra}]"')
    except (sw.errors.SharpwaveError, OSError) as error:
        _fail(f"{type(error).__name__}: {error}")


def _fail(message: str) -> None:
    print(f"sharpwave: {message}", file=sys.stderr)
    raise SystemExit(1)


def _print_version(wanted: bool) -> None:
    import typer

    if wanted:
        print(f"sharpwave {sw.__version__}")
        raise typer.Exit


def _print_info(address: str, as_json: bool) -> None:
    buffer = sw.open(address)
    try:
        stats = buffer.stats()
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
    console.print(address, highlight=False, markup=False, soft_wrap=True)  # no title: one wraps at a narrow table
    console.print(table)


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)
