"""What every machine's object has in common: its state, its timers, and the core that it speaks through."""

from typing import ClassVar, Protocol

import msgspec

from .binding import BoundMachine, Observer
from .effects import Effect
from .messages import Sender, TransferKey
from .peers import PeerBook
from .stages import Slots
from .timing import Timing


class Core(Protocol):
    """What an object may ask of the core that runs it."""

    now: float
    timing: Timing
    sender: Sender
    observer: Observer
    peers: PeerBook
    slots: Slots

    def emit(self, effect: Effect) -> None:
        """Hand an effect to whoever runs the core."""

    def post(self, entity: "CoreEntity", event: str, payload: object = None) -> None:
        """Give an object an event once the present one is dealt with."""

    def arm(self, entity: "CoreEntity", timer: str, deadline: float) -> None:
        """Give an object the event of this name at ``deadline``, unless it re-arms or disarms the timer."""

    def next_sequence(self) -> int:
        """Return a number that no question or last word of this rank has had, higher than all before."""

    def forget(self, entity: "CoreEntity") -> None:
        """Drop an object that nothing is to be remembered of."""


class TimerRang(msgspec.Struct, frozen=True):
    """What comes with the event of a timer."""

    timer: str


class CoreEntity:
    """An object that a machine of the spec moves."""

    machine: ClassVar[BoundMachine]
    __slots__ = ("core", "key", "state", "timers")

    def __init__(self, core: Core, key: TransferKey) -> None:
        self.core = core
        self.key = key
        self.state = self.machine.spec.initial
        self.timers: dict[str, float] = {}

    @property
    def observer(self) -> Observer:
        """Who hears of this object's steps."""
        return self.core.observer

    def fire(self, event: str, payload: object = None) -> bool:
        """Give the object an event now; return whether a row of the spec took it."""
        return self.machine.fire(self, event, payload)

    def arm(self, timer: str, seconds: float) -> None:
        """Give the object the event ``timer`` after this long."""
        self.core.arm(self, timer, self.core.now + seconds)

    def disarm(self, *timers: str) -> None:
        """Forget these timers."""
        for timer in timers:
            self.timers.pop(timer, None)
