"""``sharpwave generate``: a language model behind an HTTP server."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

__all__ = ["build_app"]


def build_app() -> "typer.Typer":
    """Returns the Typer application of the subcommand."""
    import typer

    app = typer.Typer(help="Generate with a language model.", no_args_is_help=True)

    @app.callback()
    def group() -> None:  # with it a single command keeps its name
        pass

    @app.command()
    def serve(
        folder: Annotated[
            Path, typer.Argument(help="A Hugging Face folder, or a folder of versions: then its newest one.")
        ],
        host: Annotated[
            str, typer.Option(help="Where to listen; beyond this machine with --key-file only.")
        ] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
        key_file: Annotated[
            Path | None, typer.Option("--key-file", help="A file with the key that callers give as bearer token.")
        ] = None,
        name: Annotated[str | None, typer.Option(help="Of the model; its folder's name unless given.")] = None,
        slots: Annotated[int, typer.Option(min=1, help="Answers that are generated side by side.")] = 8,
        context: Annotated[
            int | None, typer.Option(min=1, help="Tokens of prompt and answer; what the model can unless given.")
        ] = None,
        chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens computed in a step at most.")] = 256,
        dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the folder's own.")] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
        seed: Annotated[int, typer.Option(min=0, help="For requests without a seed.")] = 0,
        drain: Annotated[float, typer.Option(min=0, help="Seconds for running requests after SIGTERM.")] = 10.0,
    ) -> None:
        """Serve a model over HTTP until SIGTERM or Ctrl-C: vLLM's token protocol, OpenAI's completions and chat.

        The first line printed is the address. Exit code 2: it could not begin; 1: the engine failed.
        """
        from sharpwave.tools.generate_process import GeneratorOptions, run_generator
        from sharpwave.tools.process_life import BadStart

        options = GeneratorOptions(
            folder, host, port, key_file, name, slots, context, chunk, dtype, device, seed, drain_s=drain
        )
        try:
            run_generator(options)
        except BadStart as error:
            print(f"sharpwave: {error}", file=sys.stderr)
            raise typer.Exit(2) from None

    return app
