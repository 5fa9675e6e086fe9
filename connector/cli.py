"""The command line, `dfirst`. Each command imports what it needs when it runs, so that `--help` is quick."""

from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from dfirst.spec.explore.commands import explore, simulate
from dfirst.spec.given_path import not_empty
from dfirst.spec.number_option import number, whole_number
from dfirst.spec.output_file import as_json, prepare, write

from .bench.commands import bench
from .chaos.commands import chaos
from .endings import fail, need_vllm
from .what_if.answer import HOW_TO_CHECK
from .what_if.command import plan

if TYPE_CHECKING:
    from rich.console import Console

    from .engine_options import EngineLayout

app = typer.Typer(
    help=(
        "Disaggregated serving with vLLM: prefill engines compute the prompts, decode engines the answers, "
        "and the KV cache moves between them."
    ),
    epilog="Start with: dfirst demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dfirst {version('dfirst')}")
        raise typer.Exit


@app.callback()
def dfirst(
    asked: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The options of `dfirst` itself, before a command."""


class Mode(str, Enum):
    """blockwise: D pulls when the prompt is computed; layerwise: P pushes each layer while it computes."""

    BLOCKWISE = "blockwise"
    BLOCKWISE_D_FIRST = "blockwise-d-first"
    LAYERWISE = "layerwise"


class DemoModel(str, Enum):
    GQA = "gqa"
    MLA = "mla"


MODE_HELP = (
    "How the KV cache moves unless a request says otherwise in its header X-DFirst-Mode. blockwise: the "
    "decode engine pulls it when the prompt is computed; blockwise-d-first: so too, but both engines hear of "
    "the request at once; layerwise: the prefill engine pushes each layer "
    "while it computes the next."
)
ALL_KEYS_HELP = "The directory that dfirst keys has made: its engines and its router use it."
ROUTER_KEYS_HELP = "A directory with engines.key and routers.key_secret, both made by dfirst keys."
MOST_PORT = 65535
MOST_SECONDS = 7 * 24 * 3600
LAYOUT_HELP = "tp=2,dp=1 gives the ranks; devices=0+1 the accelerators, by their place."
LAYOUTS_HELP = "Repeat it for several; tp=1 if none is given."


@app.command()
def demo(
    model: Annotated[DemoModel, typer.Option(help="Which small model to make and use.")] = DemoModel.GQA,
    prefill: Annotated[str, typer.Option(metavar="LAYOUT", help=f"The prefill side: {LAYOUT_HELP}")] = "tp=1",
    decode: Annotated[str, typer.Option(metavar="LAYOUT", help="The decode engine, likewise.")] = "tp=1",
    work_dir: Annotated[
        Path,
        typer.Option(parser=not_empty("--work-dir"), metavar="DIR", help="For the model, logs and traces."),
    ] = Path(".demo"),
    json_file: Annotated[Path, typer.Option("--json", help="The table as JSON.")] = Path("demo.json"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs and traces also when all is well.")] = False,
) -> None:
    """Show that it works here: real engines, both modes, every answer compared token for token.

    Makes a small model, lets one engine alone answer all prompts, then a prefill and a decode engine with a
    router between. Prints one row for each request: what moved, how fast, through which states. Ends with 1
    if an answer differs or a KV cache did not move. Takes about three minutes on two cores.
    """
    need_vllm()
    prefill_layout, decode_layout = read_layout("--prefill", prefill), read_layout("--decode", decode)
    prepare("--json", json_file)
    from .demo import DemoSettings, run_demo
    from .launch import LaunchError

    settings = DemoSettings(
        work_dir=work_dir,
        json_file=json_file,
        keep=keep,
        kind=model.value,
        prefill=prefill_layout,
        decode=decode_layout,
    )
    try:
        report = run_demo(settings, new_console())
    except LaunchError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; the engines are stopped", status=130)
    if report.problems:
        raise typer.Exit(1)


@app.command()
def up(
    model: Annotated[str | None, typer.Argument(help="A directory or a name, as vLLM takes it.")] = None,
    demo_model: Annotated[
        DemoModel | None, typer.Option(help="Make a small model with random weights and use that.")
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYOUT", help=f"A prefill engine: {LAYOUT_HELP} {LAYOUTS_HELP}"),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="LAYOUT", help=f"A decode engine, likewise. {LAYOUTS_HELP}")
    ] = None,
    mode: Annotated[Mode, typer.Option(help=MODE_HELP)] = Mode.BLOCKWISE,
    host: Annotated[str, typer.Option(help="The address that engines and router listen on.")] = "127.0.0.1",
    port: Annotated[
        int, whole_number("--port", "The router's; 0 takes a free one.", least=0, most=MOST_PORT)
    ] = 8000,
    max_model_len: Annotated[
        int | None, whole_number("--max-model-len", "As vLLM's --max-model-len.", least=1)
    ] = None,
    vllm_arg: Annotated[
        list[str] | None,
        typer.Option(help="One more argument for every engine: --vllm-arg=--trust-remote-code. Repeat it."),
    ] = None,
    work_dir: Annotated[
        Path, typer.Option(parser=not_empty("--work-dir"), metavar="DIR", help="For logs and the demo model.")
    ] = Path(".demo"),
    curve_keys: Annotated[Path | None, typer.Option(help=ALL_KEYS_HELP)] = None,
) -> None:
    """Start prefill engines, decode engines and the router on this host, and keep them until Ctrl-C.

    dfirst up --demo-model gqa

    dfirst up /models/llama --prefill tp=2 --decode tp=1,dp=2 --mode layerwise
    """
    if (model is None) == (demo_model is None):
        fail("name a model, or make one with --demo-model gqa; one of the two", status=2)
    prefill_layouts = tuple(read_layout("--prefill", text) for text in prefill or ["tp=1"])
    decode_layouts = tuple(read_layout("--decode", text) for text in decode or ["tp=1"])
    need_vllm()
    from .curve import read_engine_keys, read_router_keys
    from .demo_model import make_model
    from .launch import LaunchError
    from .local_set import LocalSetSpec
    from .processes import check_port
    from .up import run_up

    try:
        check_port(host, port)
        if curve_keys is not None:
            read_engine_keys(str(curve_keys))
            read_router_keys(str(curve_keys))
    except (ValueError, LaunchError) as error:
        fail(str(error), status=2)

    work = work_dir.resolve()
    console = new_console()
    if demo_model is not None:
        model = str(make_model(work / f"model-{demo_model.value}", demo_model.value))
    assert model is not None
    spec = LocalSetSpec(
        model=model,
        served_model_name="demo" if demo_model else Path(model).name if Path(model).is_dir() else model,
        logs=work / "logs",
        prefill=prefill_layouts,
        decode=decode_layouts,
        mode=mode.value,
        host=host,
        router_port=port,
        curve_keys=None if curve_keys is None else str(curve_keys.resolve()),
        max_model_len=max_model_len,
        vllm_args=tuple(vllm_arg or ()),
    )
    try:
        run_up(spec, console)
    except LaunchError as error:
        fail(str(error))


@app.command()
def router(
    prefill: Annotated[
        list[str],
        typer.Option(metavar="URL", help="A prefill engine: http://host:8100. Repeat it for several."),
    ],
    decode: Annotated[list[str], typer.Option(metavar="URL", help="A decode engine, likewise.")],
    host: Annotated[
        str,
        typer.Option(help="The address to listen on; 0.0.0.0 are all of this host's of IPv4, :: of IPv6."),
    ] = "0.0.0.0",
    port: Annotated[int, whole_number("--port", "The port to listen on.", least=1, most=MOST_PORT)] = 8000,
    mode: Annotated[Mode, typer.Option(help=MODE_HELP)] = Mode.BLOCKWISE,
    advertised_host: Annotated[
        str | None,
        typer.Option(
            help="Where decode engines reach this router. If not given: --host, and where that is all "
            "addresses, this host's towards the first --decode."
        ),
    ] = None,
    curve_keys: Annotated[Path | None, typer.Option(help=ROUTER_KEYS_HELP)] = None,
    max_body_bytes: Annotated[
        int | None, whole_number("--max-body-bytes", "Longer requests are answered with 413.", least=1)
    ] = None,
    max_concurrent_requests: Annotated[
        int | None,
        whole_number("--max-concurrent-requests", "Further ones are answered with 503.", least=1),
    ] = None,
    request_timeout_seconds: Annotated[
        float | None,
        number("--request-timeout-seconds", "Longer answers end with 504.", least=1, most=MOST_SECONDS),
    ] = None,
) -> None:
    """Serve /v1/completions and /v1/chat/completions in front of engines that run already.

    dfirst router --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
    """
    from .launch import LaunchError
    from .processes import check_port
    from .router.server import run_router
    from .router.settings import RouterSettings, parse_mode

    limits = {
        "max_body_bytes": max_body_bytes,
        "max_concurrent_requests": max_concurrent_requests,
        "request_timeout_seconds": request_timeout_seconds,
    }
    try:
        settings = RouterSettings(
            prefill=tuple(prefill),
            decode=tuple(decode),
            host=host,
            port=port,
            mode=parse_mode(mode.value),
            advertised_host=advertised_host,
            curve_keys=None if curve_keys is None else str(curve_keys),
            **{name: value for name, value in limits.items() if value is not None},
        )
        check_port(host, port)
        run_router(settings)
    except (ValueError, LaunchError) as error:
        fail(str(error), status=2)


@app.command()
def keys(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=not_empty("DIRECTORY"), metavar="DIRECTORY", help="The directory to write them to."
        ),
    ],
) -> None:
    """Make the keys that close the side channel to strangers: one pair for the engines, one for routers.

    dfirst keys /etc/dfirst/keys

    Copy engines.key, engines.key_secret and routers.key to every engine's host and name the directory there
    as "curve_keys" in the extra config; copy engines.key and routers.key_secret to every router's host.
    """
    from .curve import make_keys

    try:
        written = make_keys(directory)
    except ValueError as error:
        fail(str(error), status=2)
    except OSError as error:
        fail(f"the keys cannot be written to {directory}: {error.strerror}", status=2)
    for file in written:
        typer.echo(f"wrote {file}")


@app.command()
def diagrams(
    out: Annotated[
        Path,
        typer.Argument(
            parser=not_empty("OUT"),
            metavar="OUT",
            help="The directory for the diagrams, in a checkout spec/diagrams.",
        ),
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; end with 1 if what is there is stale.")
    ] = False,
) -> None:
    """Draw the state machines of the spec as SVG and Mermaid."""
    from dfirst.spec import diagrams as drawing
    from dfirst.spec.dot import DotMissing

    if not check:
        try:
            drawing.write(out)
        except DotMissing as error:
            fail(str(error))
        except OSError as error:
            fail(f"the diagrams cannot be written to {out}: {error.strerror}", status=2)
        typer.echo(f"written to {out}")
        return
    stale = drawing.check(out)
    if stale:
        fail(f"stale in {out}: {', '.join(stale)}; draw them again with: dfirst diagrams {out}")
    typer.echo(f"the diagrams in {out} are current")


@app.command()
def conform(
    traces: Annotated[
        list[Path],
        typer.Argument(
            parser=not_empty("TRACE"),
            metavar="TRACE...",
            help="Files, or directories: their files *.jsonl, but not those of directories in them.",
        ),
    ],
    running: Annotated[
        bool, typer.Option("--running", help="Let unfinished transfers be: the engines still run.")
    ] = False,
    ended: Annotated[
        bool, typer.Option("--ended", help="Let none be, also where a file has no end: all was over.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="What was found, as JSON.")] = None,
) -> None:
    """Hold the traces of engines (trace_path) against the spec; end with 1 at the first broken rule.

    dfirst conform .demo/traces
    """
    from dfirst.spec.conform import conform as hold
    from dfirst.spec.conformance.files import why_no_trace

    if running and ended:
        fail("--running says that the engines still run, and --ended that all was over: give one", status=2)
    prepare("--json", json_file)
    try:
        found = hold(traces, running, ended)
        why = "" if found.lines or found.violation else why_no_trace(traces)
    except OSError as error:
        fail(f"cannot read the traces: {error.filename}: {error.strerror}", status=2)
    if json_file is not None:
        write("--json", json_file, as_json(found))
    if found.violation is not None:
        fail(found.violation.sentence)
    if why:
        fail(why, status=2)
    if not found.transfers:
        typer.echo("warning: what was looked at holds no transfer, so nothing is said of any", err=True)
    for line in found.words():
        typer.echo(line)


app.add_typer(bench, name="bench")
app.command(epilog=HOW_TO_CHECK)(plan)
app.command()(chaos)
app.command()(explore)
app.command()(simulate)


def read_layout(option: str, text: str) -> "EngineLayout":
    from .engine_options import parse_layout
    from .host import check_devices

    try:
        layout = parse_layout(text)
        check_devices(layout.devices)
        return layout
    except ValueError as error:
        fail(f"{option}: {error}", status=2)


def new_console() -> "Console":
    from rich.console import Console

    return Console()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
