"""``sharpwave keys``: makes, lists and revokes the keys of a server's clients."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

__all__ = ["build_app"]


def build_app() -> "typer.Typer":
    """Returns the Typer application of the subcommand."""
    import typer

    app = typer.Typer(help="Make, list and revoke the keys of a server's clients.", no_args_is_help=True)
    folder_option = typer.Option(
        "--folder", help="The server's folder of keys; $SHARPWAVE_KEYS or ~/.config/sharpwave/keys unless given."
    )

    @app.command()
    def new(
        name: Annotated[str, typer.Argument(help="Of the client: letters, digits, '_', '.', '-'.")],
        role: Annotated[str, typer.Option(help="What it may do: some of read, write, admin.")] = "read,write",
        folder: Annotated[Path | None, folder_option] = None,
    ) -> None:
        """Make a client's key, NAME.key, and the server's own if it has none. Prints the path of NAME.key."""
        from sharpwave.service.keys import default_folder, make_key

        print(make_key(folder or default_folder(), name, [part.strip() for part in role.split(",")]))

    @app.command()
    def revoke(
        name: Annotated[str, typer.Argument(help="Of the client.")],
        folder: Annotated[Path | None, folder_option] = None,
    ) -> None:
        """End a client's key. Running servers refuse its next message."""
        from sharpwave.service.keys import default_folder, revoke_key

        revoke_key(folder or default_folder(), name)
        print(f"revoked {name}")

    @app.command("list")
    def list_keys(
        folder: Annotated[Path | None, folder_option] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    ) -> None:
        """List the known clients: name, roles and public key."""
        from sharpwave.service.keys import ROLES, default_folder, read_clients

        clients = sorted((client, public) for public, client in read_clients(folder or default_folder()).items())
        rows = [(name, [role for role in ROLES if role in roles], public) for (name, roles), public in clients]
        if as_json:
            print(json.dumps([{"name": name, "roles": roles, "public": public} for name, roles, public in rows]))
        else:
            for name, roles, public in rows:
                print(f"{name}\t{','.join(roles)}\t{public}")

    return app
