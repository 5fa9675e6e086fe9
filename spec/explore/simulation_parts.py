"""What a large random world is made of: processes, engines, copies, and the waits that it is run with."""

from dataclasses import dataclass, field

from dfirst.protocol.commands import LegKey
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.rank import RankCore
from dfirst.protocol.scheduler import SchedulerCore
from dfirst.protocol.shards import Directory
from dfirst.protocol.timing import Timing

from .violation import Violation

RANKS = 2
HEADS = 2
TIMING = Timing(
    lease_seconds=4.0,
    query_timeout_seconds=5.0,
    hold_seconds=12.0,
    transfer_deadline_seconds=15.0,
    farewell_seconds=4.0,
    tombstone_seconds=40.0,
    copy_timeout_seconds=3.0,
    quarantine_seconds=3.0,
    stall_allowance_seconds=1.0,
    clock_step_seconds=0.01,
    clock_drift_ratio=0.02,
)
LONGEST_DELAY_SECONDS = 10.0
"""No letter lives longer: well below the time for which ended transfers are remembered."""


class Quiet:
    """Hears the machines; an event that the spec does not expect is a violation."""

    def __init__(self) -> None:
        self.steps = 0

    def stepped(self, entity: object, row: object, source: str) -> None:
        self.steps += 1

    def unheard(self, entity: object, event: str, expected: bool) -> None:
        if not expected:
            name = type(entity).__name__
            raise Violation(
                "F3", f"{name} has no row and no word for {event} in {getattr(entity, 'state', '')}"
            )


@dataclass(eq=False)
class Job:
    """The copies of one leg."""

    leg: LegKey
    mover: "Rank"
    mode: str
    left: int
    in_air: bool = False
    spoilt: bool = False
    stopped: bool = False
    over: bool = False


@dataclass(eq=False)
class Rank:
    """A process: gone after a restart, but its writes may still land."""

    engine: "Engine"
    core: RankCore
    jobs: dict[LegKey, Job] = field(default_factory=dict)
    held: dict[TransferKey, str] = field(default_factory=dict)
    """Blocks that vLLM counts on a report for, and the request's id."""
    wake: float = float("inf")
    last_step: float = 0.0
    alive: bool = True
    good: set[tuple[TransferKey, int]] = field(default_factory=set)
    """On D: transfers and P ranks whose bytes are all here."""

    @property
    def number(self) -> int:
        return self.core.sender.rank


@dataclass(eq=False)
class Engine:
    """One incarnation after the other."""

    name: str
    rate: float
    incarnation: int
    ranks: list[Rank]
    scheduler: SchedulerCore
    directory: Directory
    reported: dict[str, list[str]] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    """vLLM's requests that wait for an outcome, or whose blocks the ranks hold."""
