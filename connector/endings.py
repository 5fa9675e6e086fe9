"""How a command ends that cannot do its work: one sentence, and a status."""

from typing import NoReturn

import typer


def fail(message: str, status: int = 1) -> NoReturn:
    """Say what is wrong and end the command."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)


def need_vllm() -> None:
    """End the command where vLLM is not installed."""
    from .host import vllm_is_installed

    if not vllm_is_installed():
        fail("vLLM is not installed here; install dfirst with the extra for this host: cpu, cuda or ascend")
