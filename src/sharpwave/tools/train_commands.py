"""``sharpwave train``, ``resume``, ``evaluate``, ``status``, ``stop``: runs that train a language model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

__all__ = ["add_commands"]


def add_commands(app: "typer.Typer") -> None:
    """Adds the commands to the application."""
    import typer

    folder_argument = typer.Argument(help="The folder of the run.", file_okay=False)
    changes_argument = typer.Argument(metavar="[KEY=VALUE]...", help="Settings; a dot leads into a table.")
    processes_option = typer.Option("--processes", help="Generators, agents, learner: each a process of its own.")

    def train(
        what: Annotated[
            str, typer.Argument(metavar="TASK | RUN.toml", help="sort, sums, guess, math; module:function; or a file.")
        ],
        changes: Annotated[list[str] | None, changes_argument] = None,
        out: Annotated[
            Path | None, typer.Option("--out", file_okay=False, help="The folder to make; sharpwave-TASK unless given.")
        ] = None,
        processes: Annotated[bool, processes_option] = False,
    ) -> None:
        """Train a language model by reinforcement learning, asynchronously; max_staleness=0 is synchronous.

        Exit code 3: the run ended without reaching its goal.
        """
        from sharpwave.tools.train_process import begin, drive

        if not drive(begin(what, changes or [], out, processes), processes):
            raise typer.Exit(3)

    def resume(
        folder: Annotated[Path, folder_argument],
        changes: Annotated[list[str] | None, changes_argument] = None,
        processes: Annotated[bool, processes_option] = False,
    ) -> None:
        """Go on with a run that was stopped or killed, from its last checkpoint."""
        from sharpwave.tools.train_process import drive, reopen

        if not drive(reopen(folder, changes or [], processes), processes):
            raise typer.Exit(3)

    def evaluate(
        folder: Annotated[Path, folder_argument],
        model: Annotated[
            Path | None, typer.Option("--model", help="A Hugging Face folder; the run's best version unless given.")
        ] = None,
        show: Annotated[int, typer.Option("--show", min=0, help="Also print so many items with their answers.")] = 0,
    ) -> None:
        """Score a version on the run's held-out items."""
        from sharpwave.tools.train_process import evaluate

        evaluate(folder, model, show)

    def status(
        folder: Annotated[Path, folder_argument],
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    ) -> None:
        """Show where a run is, and who waits for whom."""
        from sharpwave.tools.train_process import print_status

        print_status(folder, as_json)

    def stop(
        folder: Annotated[Path, folder_argument],
        timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end of the run.")] = 60.0,
    ) -> None:
        """End a run after the step that is being made, with a checkpoint."""
        from sharpwave.tools.train_process import stop

        stop(folder, timeout)

    for command in (train, resume, evaluate, status, stop):
        app.command()(command)
