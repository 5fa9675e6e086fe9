"""How a command ends that cannot do its work: one sentence, and a status."""

from typing import NoReturn

import typer


def fail(message: str, status: int = 1) -> NoReturn:
    """Say what is wrong and end the command."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)
