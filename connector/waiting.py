"""Says that something takes a while: a moving line on a terminal, elsewhere a plain line now and then."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

# A first word after two seconds, so that nothing seems to hang; what is quicker stays silent in a log.
FIRST_SECONDS = 2.0
EVERY_SECONDS = 10.0


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Around a block that takes a while; says at its end how long it took, if it ended well."""
    started = time.monotonic()
    over = threading.Event()
    say = _on_terminal if console.is_terminal else _in_log
    speaker = threading.Thread(target=say, args=(console, what, started, over), daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()
    console.print(f"[green]✓[/green] {what} [dim]({time.monotonic() - started:.0f} s)[/dim]", highlight=False)


def _on_terminal(console: Console, what: str, started: float, over: threading.Event) -> None:
    with console.status(what) as status:
        while not over.wait(0.5):
            status.update(f"{what} [dim]{time.monotonic() - started:.0f} s[/dim]")


def _in_log(console: Console, what: str, started: float, over: threading.Event) -> None:
    pause = FIRST_SECONDS
    while not over.wait(pause):
        console.print(f"  {what}: {time.monotonic() - started:.0f} s", highlight=False)
        pause = EVERY_SECONDS
