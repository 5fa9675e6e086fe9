"""Which worlds are explored: how many ranks, which mode, how many faults of which kinds, which clocks.

All waits are small whole numbers of a clock's unit. A step of time moves each engine's clock by its rate,
4 or 5 units: clocks that drift apart by a quarter, as the timings below are told. A lease of 15 units is
over after 3 steps of a fast clock and 4 of a slow one, so a margin that is forgotten shows at once.
"""

from dataclasses import dataclass

from dfirst.protocol.modes import BLOCKWISE, LAYERWISE
from dfirst.protocol.timing import Timing

SLOW, FAST = 4, 5

STEADY = Timing(
    lease_seconds=15.0,
    query_retry_seconds=4.0,
    query_timeout_seconds=12.0,
    hold_seconds=20.0,
    transfer_deadline_seconds=28.0,
    done_retry_seconds=4.0,
    farewell_seconds=10.0,
    tombstone_seconds=24.0,
    copy_timeout_seconds=4.0,
    quarantine_seconds=8.0,
    stall_allowance_seconds=4.0,
    clock_step_seconds=0.5,
    clock_drift_ratio=0.25,
)

SWAPPED = {"prefill_rate": FAST, "decode_rate": SLOW}

NETWORK = ("lose", "repeat", "delay")
COPIES = ("slow", "break", "suspend")
CRASHES = ("die", "restart")
ABORTS = ("abort", "cancel", "again", "absent", "late")
EVERYTHING = (*NETWORK, *COPIES, *CRASHES, *ABORTS)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One world and the faults that may come to it."""

    name: str
    mode: str
    prefill_ranks: int = 1
    decode_ranks: int = 1
    heads: int = 2
    transfers: int = 1
    faults: int = 2
    kinds: tuple[str, ...] = EVERYTHING
    prefill_rate: int = SLOW
    decode_rate: int = FAST
    timing: Timing = STEADY
    batches: int = 1
    """Batches of copies in a leg, and layers' worth of computing in a push."""
    met: bool = True
    """Whether the engines know each other's layout from the start."""
    owner_met: bool = False
    """Whether the owner knows the mover's layout, though nobody else knows anybody's."""
    prefill_first: bool = True
    """Block-wise: whether D hears of the request only when P has computed the prompt."""
    attempts: bool = False
    """Whether the transfers are attempts of the same one."""
    staged: bool = False
    """Whether every batch is staged, by owners that have one slot each."""
    unfit: bool = False
    """Whether the two engines serve different models."""
    disagree: bool = False
    """Whether the two engines were told prompts of different lengths."""
    coarse: bool = False
    """Whether what a mover reads from its clock before it begins a batch is one clock step old."""
    all_cached: bool = False
    """Whether D has the whole prompt cached and reads nothing."""
    bound_steps: int = 8
    """L1: steps of time after which everything must have ended once faults stop."""
    wait_bound_steps: int = 8
    """L1: steps of time after which vLLM must have everything that it waits for once faults stop."""
    mild_bounds_steps: tuple[int, ...] = (0, 2)
    """Steps of time after which vLLM must have everything that it waits for, where nothing has come that only
    a time-out ends, but so many messages lost, repeated or late.
    """
    harmless_faults: int = 1
    """So many messages lost, repeated or late must not fail a transfer (rule R9)."""
    told_apart: bool = False
    """Whether states that met other kinds of faults are other states, so that each kind has its bounds; slow
    copies then stay slow when faults stop.
    """
    orderly: bool = False
    """Whether letters and steps come in one fixed order, and another order is one more fault (a reordering).
    Otherwise every order is explored at no cost."""
    limit: int = 4_000_000
    """States after which the exploration gives up: it should have ended by itself long before."""

    @property
    def layerwise(self) -> bool:
        """Whether P pushes."""
        return self.mode == LAYERWISE

    @property
    def ranks(self) -> int:
        """Ranks of both engines."""
        return self.prefill_ranks + self.decode_ranks


def pull(name: str, **options: object) -> Configuration:
    """Return a block-wise world."""
    return Configuration(name=name, mode=BLOCKWISE, **options)  # type: ignore[arg-type]


def push(name: str, **options: object) -> Configuration:
    """Return a layer-wise world."""
    return Configuration(name=name, mode=LAYERWISE, **options)  # type: ignore[arg-type]
