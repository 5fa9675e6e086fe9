"""Renewal of leases, batched: one RENEW for all transfers with the same peer (rule R1).

A peer's leases are renewed when a third of the shortest of them has passed, so that two answers may be lost
before one runs out.
"""

import msgspec

from .messages import Renew, Renewed, Sender, TransferKey
from .mover_leg import Granted, MoverLeg, Peer

RENEWALS_PER_LEASE = 3
MAX_OUTSTANDING = 4


class Asked(msgspec.Struct, frozen=True):
    """A renewal that was asked for."""

    at: float
    keys: tuple[TransferKey, ...]


class PeerRenewal:
    """The legs under lease with one peer, for one mode."""

    __slots__ = ("due", "legs", "mode", "outstanding", "peer")

    def __init__(self, peer: Peer, mode: str) -> None:
        self.peer = peer
        self.mode = mode
        self.legs: dict[TransferKey, MoverLeg] = {}
        self.outstanding: dict[int, Asked] = {}
        self.due = 0.0

    def ask(self, sender: Sender, sequence: int, now: float) -> Renew | None:
        """Return one question for all legs that are still copying; None if there are none."""
        self.legs = {key: leg for key, leg in self.legs.items() if leg.state == "COPYING"}
        if not self.legs:
            self.outstanding.clear()
            return None
        keys = tuple(self.legs)
        self.outstanding[sequence] = Asked(now, keys)
        if len(self.outstanding) > MAX_OUTSTANDING:
            del self.outstanding[next(iter(self.outstanding))]
        return Renew(
            sender=sender,
            sequence=sequence,
            target_incarnation=self.peer.incarnation,
            mode=self.mode,
            keys=list(keys),
        )

    def take(self, answer: Renewed) -> None:
        """Give every leg that was asked for its answer."""
        asked = self.outstanding.pop(answer.sequence, None)
        if asked is None:
            return
        grant = Granted(asked.at, answer.lease_seconds)
        wanted = set(asked.keys)
        for key in answer.extended:
            leg = self.legs.get(key) if key in wanted else None
            if leg is not None:
                leg.fire("renewed", grant)
        for key in answer.gone:
            leg = self.legs.get(key) if key in wanted else None
            if leg is not None:
                leg.fire("gone")
