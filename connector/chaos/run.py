"""`dfirst chaos`: one engine answers all prompts once, then a pair answers them while it is being broken."""

import asyncio
import shutil
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import msgspec
from dfirst.spec.conform import Conformance, Unfinished, conform
from rich.console import Console

from ..demo import answers_of_one_engine
from ..demo_client import Answer
from ..demo_model import make_model
from ..local_set import LocalSet, LocalSetSpec
from ..processes import end_on_sigterm_as_on_ctrl_c
from ..waiting import waiting
from . import metrics
from .accounts import SHOWN, BlocksHeld, ChaosReport, count, sums_of, told
from .bench import Bench
from .follower import TraceFollower
from .load import Pool
from .logs import errors_logged
from .orders import COPY_FAULTS, MESSAGE_FAULTS, FaultDesk
from .plan import Plan, make_plan
from .ports import free_port_range
from .switch import VARIABLE

MODEL_NAME = "chaos"
MAX_MODEL_LEN = 2048
PREFILL_CHUNK_TOKENS = 256
KV_CACHE_BYTES = 24 * 1024 * 1024
"""96 blocks of 32 tokens: a crowd does not fit."""
FREE_SECONDS = 30.0
"""By then after the end, no block may be held."""
PREEMPTED = "request preempted, KV cache full"
TIMERS: dict[str, float] = {
    "lease_seconds": 4.0,
    "query_retry_seconds": 0.3,
    "query_timeout_seconds": 3.0,
    "hold_seconds": 12.0,
    "transfer_deadline_seconds": 60.0,
    "done_retry_seconds": 0.3,
    "farewell_seconds": 4.0,
    "tombstone_seconds": 60.0,
    "copy_timeout_seconds": 5.0,
    "quarantine_seconds": 1.0,
    "stall_allowance_seconds": 1.5,
}
"""Short, so that much comes to its end in a short run."""


class ChaosSettings(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    minutes: float
    work_dir: Path
    json_file: Path | None = None
    # Leave logs and traces behind also when all is well.
    keep: bool = False


def run_chaos(settings: ChaosSettings, console: Console) -> ChaosReport:
    """Run it all, return the account. Raises `LaunchError` if a server does not start or ends by itself."""
    end_on_sigterm_as_on_ctrl_c()
    work = settings.work_dir.resolve()
    for name in ("logs", "traces", "faults"):
        shutil.rmtree(work / name, ignore_errors=True)
        (work / name).mkdir(parents=True)
    plan = make_plan(settings.seed, settings.minutes)
    pool = Pool(settings.seed)
    model = make_model(work / "model-gqa", "gqa")
    references = _references(str(model), work, pool, console)
    desk = FaultDesk(work / "faults")
    running = LocalSet(_set_spec(str(model), work, free_port_range(2)))

    def around(what: str) -> AbstractContextManager[None]:
        return waiting(console, what)

    try:
        running.start(around)
        bench, held, living = asyncio.run(_broken(running, plan, pool, references, desk, work, console))
    finally:
        running.stop()
    with waiting(console, "holding the traces against the spec"):
        conformance = conform([work / "traces"])
    unfinished = [one for one in conformance.unfinished if Path(one.file).name in living]
    report = _report(plan, settings.minutes, bench, held, desk, conformance, unfinished, work)
    if settings.json_file is not None:
        report.write(settings.json_file)
    if settings.keep or not report.is_well:
        console.print(f"logs, traces and orders are in {work}", highlight=False)
    else:
        for name in ("logs", "traces", "faults"):
            shutil.rmtree(work / name)
    return report


def _set_spec(model: str, work: Path, ports: str) -> LocalSetSpec:
    return LocalSetSpec(
        model=model,
        served_model_name=MODEL_NAME,
        logs=work / "logs",
        traces=work / "traces",
        max_model_len=MAX_MODEL_LEN,
        prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
        kv_cache_bytes=KV_CACHE_BYTES,
        connector_config={**TIMERS, "port_range": ports},
        # Requests can be aborted by their names then, on one engine alone.
        vllm_args=("--enable-scale-out",),
        environment={VARIABLE: str(work / "faults")},
    )


def _references(model: str, work: Path, pool: Pool, console: Console) -> list[Answer]:
    log = work / "logs" / "single.log"
    answers = answers_of_one_engine(model, log, MODEL_NAME, MAX_MODEL_LEN, tuple(pool.prompts), console)
    broken = next((answer.error for answer in answers if answer.error is not None), None)
    if broken is not None:
        raise RuntimeError(f"the single engine gave no reference: {broken}")
    return answers


async def _broken(
    running: LocalSet,
    plan: Plan,
    pool: Pool,
    references: list[Answer],
    desk: FaultDesk,
    work: Path,
    console: Console,
) -> tuple[Bench, list[BlocksHeld], set[str]]:
    """Return the bench, what was held after its end, and the traces whose writers lived to see it."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        follower = TraceFollower(work / "traces")
        bench = Bench(running, plan, pool, references, desk, follower, client)
        with waiting(console, f"{plan.seconds:.0f} s of load and faults"):
            await bench.run()
        running.check()
        with waiting(console, "waiting for the last blocks to be let go"):
            held = await _held(running, client)
        follower.poll()
        return bench, held, follower.living()


async def _held(running: LocalSet, client: httpx.AsyncClient) -> list[BlocksHeld]:
    """Count the blocks in use until there are none, or the time is over."""
    ended = time.monotonic()
    held: dict[str, BlocksHeld] = {}
    while True:
        passed = time.monotonic() - ended
        for engine in running.engines:
            if engine.name in held and held[engine.name].blocks == 0:
                continue
            blocks = await metrics.blocks_in_use(client, engine.url)
            held[engine.name] = BlocksHeld(engine=engine.spec.name, blocks=blocks, seconds=round(passed, 1))
        if passed > FREE_SECONDS or not any(one.blocks for one in held.values()):
            break
        await asyncio.sleep(0.25)
    # What a rank still repeats to a peer, or waits for, ends by itself within its time-outs.
    await asyncio.sleep(max(0.0, TIMERS["farewell_seconds"] - (time.monotonic() - ended)))
    return list(held.values())


def _report(
    plan: Plan,
    minutes: float,
    bench: Bench,
    held: list[BlocksHeld],
    desk: FaultDesk,
    conformance: Conformance,
    unfinished: list[Unfinished],
    work: Path,
) -> ChaosReport:
    kinds = Counter(bench.injected)
    for fault in desk.injected():
        kinds[fault.fault if fault.fault in COPY_FAULTS else f"message {fault.fault}"] += 1
    kinds[PREEMPTED] += bench.preemptions
    sums = sums_of(bench.answers, bench.outages, frozenset(bench.abort_allowed))
    errors = errors_logged(work / "logs")
    violation = conformance.violation
    findings = [
        *told("wrong answer", sums.wrong),
        *told("no answer", sums.silent),
        *told("error", sums.unexcused),
        *(
            f"{one.engine} holds {one.blocks} blocks {one.seconds:g} s after the end"
            for one in held
            if one.blocks
        ),
        *([violation.sentence] if violation is not None else []),
        *(f"not at its end: {one.transfer}, {one.machine} in {one.state}" for one in unfinished[:SHOWN]),
        *errors[:3],
    ]
    planned = {f"message {fault}" for fault in MESSAGE_FAULTS} | set(COPY_FAULTS) | {PREEMPTED}
    return ChaosReport(
        seed=plan.seed,
        minutes=minutes,
        requests=len(bench.answers),
        modes=count(asked.question.mode for asked in bench.answers),
        verdicts=count(asked.verdict for asked in bench.answers),
        faults=sum(kinds.values()),
        faults_by_kind=dict(sorted(kinds.items())),
        never_injected=sorted(kind for kind in planned if not kinds[kind]),
        wrong_answers=len(sums.wrong),
        without_answer=len(sums.silent),
        unexcused_errors=len(sums.unexcused),
        excused_errors=sums.excused,
        blocks_held=held,
        traces=conformance.summary,
        traces_refused=int(violation is not None),
        transfers_unfinished=len({one.transfer for one in unfinished}),
        errors_logged=len(errors),
        findings=findings,
    )
