# Generated from spec/trace.toml by `python -m dfirst.spec.generate`. Do not edit.
"""The lines of a trace, as a tagged union. The writer's rules are in spec/trace.toml."""

import msgspec


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line"):
    """What every line says."""

    time: float
    """Seconds since 1970."""
    process: str
    """Which process writes: its part and its number."""
    engine: str
    """The engine's configured name."""
    rank: int
    """Place in the engine; -1 for the scheduler side."""


class StartLine(TraceLine, frozen=True, kw_only=True, tag="start"):
    """The first line of every file."""

    incarnation: str
    """The rank's; empty for the scheduler side."""
    version: int
    """The wire's version."""
    timers: dict[str, float]
    """The settings of spec/timers.toml in force; empty for the scheduler side."""


class StepLine(TraceLine, frozen=True, kw_only=True, tag="step"):
    """A machine took a row of the spec."""

    machine: str
    """The machine's name."""
    transfer: str
    """The transfer's id."""
    attempt: int
    """The transfer's attempt."""
    peer: str
    """A leg's: its other rank; a request's: vLLM's id of it; empty for a transfer's own machine."""
    row: str
    """The row's id."""
    event: str
    """What the machine heard."""
    source: str
    """The state before."""
    target: str
    """The state after."""


class MessageLine(TraceLine, frozen=True, kw_only=True, tag="message"):
    """A message of the side channel left or came in. RENEW and RENEWED have a line for each transfer that
    they name; LAYOUT_QUERY, LAYOUT and ERROR name none.
    """

    way: str
    """Sent or received."""
    message: str
    """The message's tag."""
    transfer: str
    """The transfer's id."""
    attempt: int
    """The transfer's attempt."""
    sender: str
    """The rank that speaks, as the message says; empty where it does not say."""
    receiver: str
    """The rank that is meant: with the incarnation that the message names where it names one; sent: empty
    where the writer does not know whom its reply reaches.
    """
    sequence: int
    """The question's number; 0 where the message has none."""
    grant: int
    """What METADATA calls that which it lends, and what DONE says was copied; 0 in all others."""
    lease_seconds: float
    """For how long METADATA or an extending RENEWED lends; 0 in all others."""
    answer: str
    """Of a RENEWED: extended or gone; empty in all others."""


class CopyLine(TraceLine, frozen=True, kw_only=True, tag="copy"):
    """A leg's copies were started, or came to their end: none of them can move any more."""

    phase: str
    """Started or ended."""
    transfer: str
    """The transfer's id."""
    attempt: int
    """The transfer's attempt."""
    peer: str
    """The owner's rank."""
    bytes: int
    """Bytes that arrived in whole batches."""
    seconds: float
    """Time spent copying."""
    ok: bool
    """Ended: whether every byte arrived."""


class ExpectLine(TraceLine, frozen=True, kw_only=True, tag="expect"):
    """The ranks whose DONE an owner must hear by the plan. Written before a step that ends a transfer
    because all of them are over (rule S4).
    """

    transfer: str
    """The transfer's id."""
    attempt: int
    """The transfer's attempt."""
    peers: list[str]
    """The ranks."""


class ReportLine(TraceLine, frozen=True, kw_only=True, tag="report"):
    """vLLM took the report on a transfer: the release of its blocks on this rank."""

    transfer: str
    """The transfer's id."""
    attempt: int
    """The transfer's attempt."""
    request: str
    """The request, as vLLM calls it."""
    outcome: str
    """Sent, received or failed."""


class EndLine(TraceLine, frozen=True, kw_only=True, tag="end"):
    """The last line of a process that was stopped in good order. A file without it belongs to a process
    that still runs, or that was killed.
    """


Line = StartLine | StepLine | MessageLine | CopyLine | ExpectLine | ReportLine | EndLine
