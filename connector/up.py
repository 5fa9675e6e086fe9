"""`dfirst up`: P, D and the router on this host for one model, until Ctrl-C or until one of them ends."""

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from .launch import LaunchError
from .local_set import LocalSet, LocalSetSpec
from .processes import end_on_sigterm_as_on_ctrl_c
from .waiting import waiting

CHECK_SECONDS = 1.0


def run_up(spec: LocalSetSpec, console: Console) -> None:
    """Returns after Ctrl-C; raises `LaunchError` with the end of its log when one of them ends by itself."""

    def around(what: str) -> AbstractContextManager[None]:
        return waiting(console, what)

    end_on_sigterm_as_on_ctrl_c()
    running = LocalSet(spec)
    try:
        running.start(around)
        _say_how_to_use(running, console)
        while True:
            time.sleep(CHECK_SECONDS)
            running.check()
    except KeyboardInterrupt:
        console.print("\nstopping", highlight=False)
    except LaunchError:
        console.print("one of them has ended; stopping the others", highlight=False)
        raise
    finally:
        running.stop()


def curl_line(url: str, model: str, mode: str) -> str:
    """A command that a user can paste into a shell."""
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0})
    quoted = body.replace("'", "'\\''")
    headers = f"-H 'Content-Type: application/json' -H 'X-DFirst-Mode: {mode}'"
    return f"curl {url}/v1/completions {headers} -d '{quoted}'"


def _say_how_to_use(running: LocalSet, console: Console) -> None:
    spec = running.spec
    for engine in running.engines:
        console.print(f"  {engine.spec.name}: {engine.url}, log {_short(engine.log)}", highlight=False)
    console.print(f"  router: {running.router.url}, log {_short(running.router.log)}", highlight=False)
    console.print(
        "Try it (the header chooses blockwise or layerwise), and stop with Ctrl-C:", highlight=False
    )
    line = curl_line(running.router.url, spec.served_model_name, spec.mode)
    # Unwrapped, so that it can be copied whole.
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
