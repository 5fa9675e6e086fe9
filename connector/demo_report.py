"""Puts together what each request of the demo showed: its answer, its reference, its transfer's traces."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from dfirst.spec.conform import Conformance

from .demo_client import Answer
from .demo_prompts import SHARED_FIRST, SHARED_SECOND, DemoRequest
from .json_file import write_json
from .trace_reader import StatePassed, Traces, TransferTrace


class Exchange(msgspec.Struct, frozen=True):
    """A request, what the router's engines answered, and what one engine alone answered."""

    request: DemoRequest
    answer: Answer
    reference: Answer


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table and entry of demo.json. Seconds count from the transfer's first sign of life."""

    mode: str
    name: str
    prompt_tokens: int
    output_tokens: int
    bytes: int
    megabytes_per_second: float | None
    prefill_states: list[StatePassed]
    decode_states: list[StatePassed]
    equal: bool
    transfer: str | None
    # What is wrong with it, in a sentence; None if nothing is.
    problem: str | None


class Conformed(msgspec.Struct, frozen=True, kw_only=True):
    """What the traces are like, held against the spec. `broken` names the first line that breaks a rule."""

    summary: str
    broken: str | None


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole demo. `mismatches` counts answers that differ, `problems` everything that makes it fail."""

    mismatches: int
    problems: int
    model: str
    prefill: str
    decode: str
    traces: Conformed
    requests: list[RequestReport]

    def write(self, path: Path) -> None:
        write_json(path, self)


def make_report(
    exchanges: Sequence[Exchange],
    traces: Traces,
    *,
    model: str,
    prefill: str,
    decode: str,
    caches_prefixes: bool = True,
    conformance: Conformance,
) -> DemoReport:
    """`caches_prefixes`: whether the decode engine keeps prefixes, so that a shared one moves only once."""
    transfers = match_transfers(exchanges, traces)
    requests = [
        _request_report(exchange, None if name is None else traces.of(name))
        for exchange, name in zip(exchanges, transfers, strict=True)
    ]
    if caches_prefixes:
        requests = _check_shared_prefix(requests)
    violation = conformance.violation
    return DemoReport(
        mismatches=sum(not report.equal for report in requests),
        problems=sum(report.problem is not None for report in requests) + (violation is not None),
        model=model,
        prefill=prefill,
        decode=decode,
        traces=Conformed(
            summary=conformance.summary, broken=None if violation is None else violation.sentence
        ),
        requests=requests,
    )


def match_transfers(exchanges: Sequence[Exchange], traces: Traces) -> list[str | None]:
    """The transfer of each exchange: the one the router named, else the next unclaimed one of its time."""
    known = traces.transfers()
    named = {name for exchange in exchanges for name in exchange.answer.transfers}
    unclaimed = [name for name in known if name not in named]
    started = {name: traces.of(name).started or 0.0 for name in unclaimed}
    matched: list[str | None] = []
    for exchange in exchanges:
        answer = exchange.answer
        if answer.transfers:
            matched.append(next((name for name in answer.transfers if name in known), None))
            continue
        during = [name for name in unclaimed if answer.sent <= started[name] <= answer.answered]
        matched.append(during[0] if during else None)
        if during:
            unclaimed.remove(during[0])
    return matched


def _request_report(exchange: Exchange, trace: TransferTrace | None) -> RequestReport:
    request, answer = exchange.request, exchange.answer
    speed = None if trace is None else trace.megabytes_per_second
    return RequestReport(
        mode=request.mode,
        name=request.name,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        bytes=0 if trace is None else trace.bytes,
        megabytes_per_second=None if speed is None else round(speed, 1),
        prefill_states=[] if trace is None else trace.states("prefill"),
        decode_states=[] if trace is None else trace.states("decode"),
        equal=answer.equals(exchange.reference),
        transfer=None if trace is None else trace.transfer,
        problem=_problem(exchange, trace),
    )


def _problem(exchange: Exchange, trace: TransferTrace | None) -> str | None:
    answer, reference = exchange.answer, exchange.reference
    if reference.error is not None:
        return f"the single engine gave no reference: {reference.error}"
    if answer.error is not None:
        return answer.error
    if not answer.equals(reference):
        return f"the answer differs: {answer.text!r} where one engine alone gives {reference.text!r}"
    if trace is None:
        return "the traces show no transfer for it: the decode engine computed the prompt itself"
    # Every prompt here has tokens that the decode engine cannot have yet.
    if trace.bytes == 0:
        return "its transfer moved no bytes: the decode engine computed the prompt itself"
    return None


def _check_shared_prefix(reports: list[RequestReport]) -> list[RequestReport]:
    first = {report.mode: report.bytes for report in reports if report.name == SHARED_FIRST}
    checked = []
    for report in reports:
        before = first.get(report.mode, 0)
        if report.name == SHARED_SECOND and report.problem is None and report.bytes >= before:
            problem = f"it moved {report.bytes} bytes, no fewer than the first one of its prefix ({before})"
            report = msgspec.structs.replace(report, problem=problem)
        checked.append(report)
    return checked
