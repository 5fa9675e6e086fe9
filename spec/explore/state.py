"""A world's whole situation as one flat tuple, and the form in which it is changed."""

from typing import Any, NamedTuple

Job = tuple[int, int, int, int, int]
"""Mover's site (``GHOST`` if its process is gone), leg, batches begun, age in steps of the batch in the air
(-1: none), flags."""
Story = tuple[int, int, int, int, int, int, int]
"""Stage on P, stage on D, layers computed, number of the request on P and on D, flags, incarnation
offered."""

ON_P, ON_D, COMPUTED, P_NUMBER, D_NUMBER, FLAGS, OFFERED = range(7)
"""Places in a story."""

Part = tuple[int, int, int, int]
"""What an owner gathers or scatters: its site, the leg, the part, flags of a job."""

GHOST = -1
NOTHING = (-1, 0)
JOB_STOPPED, JOB_BROKEN, JOB_SLOW, JOB_SPOILT, AIR_SPOILT = 1, 2, 4, 8, 16
JOB_WANTED, JOB_READY, JOB_DIRECT, JOB_SLOT, JOB_LANDED = 32, 64, 128, 256, 512
"""In a world with staging: a STAGE is not answered; a part is gathered; the owner stages nothing; the slot is
known; a part is written and not scattered."""
ANNOUNCED, P_LATE, D_LATE, COMPUTE_LATE, TWICE, P_TWICE = 1, 2, 4, 8, 16, 32
IDLE, RUNNING, DONE, OVER, ABORTING = range(5)
"""Stages of a request. On D, RUNNING is loading; OVER has nothing left that vLLM waits for."""
HELD, RELEASED = 1, 2
"""What vLLM has done with a rank's blocks for a transfer; 0 if it has not given any."""
HARSH, ASKED, LATE, NETTED, SLOWED = 1, 256, 512, 1024, 2048
MUTE = 1 << 12
"""Shifted by a site: what it sends is lost."""
NAMES_FROM = 16
"""From this bit on, the marks say which kinds of faults have come, where a world keeps them apart."""


class State(NamedTuple):
    """Everything that an interleaving can depend on."""

    cores: tuple[int, ...]
    schedulers: tuple[int, int]
    incarnations: tuple[int, int]
    net: tuple[int, ...]
    """Letters under way, each twice its number, plus one if it is late."""
    jobs: tuple[Job, ...]
    parts: tuple[Part, ...]
    slots: tuple[tuple[int, int], ...]
    """What each site's slot holds: leg and part; (-1, 0) if neither."""
    queues: tuple[tuple[int, ...], ...]
    """For each site, the commands that its engine's steps have for it."""
    reports: tuple[tuple[tuple[int, str, str], ...], ...]
    """For each site, the reports that vLLM has not taken."""
    holds: tuple[tuple[int, ...], ...]
    """For each site and transfer: whether vLLM counts on a report before it uses the blocks again."""
    stories: tuple[Story, ...]
    merged: tuple[tuple[int, int, int, int], ...]
    """Engine, transfer, bits of the ranks that reported, whether any failed."""
    good: tuple[tuple[int, int, int], ...]
    """Mover's site, owner's site and transfer of each leg whose bytes are all there and all right."""
    left: int
    """Faults that may still come."""
    marks: int
    """``HARSH`` if something came that only a time-out can end, ``ASKED`` if somebody asked for the end,
    ``LATE`` if a part of the story took its time, ``NETTED`` if the network did something, ``SLOWED`` if a
    copy took its time; the bits between: sites whose commands are late, and sites that are mute."""


class Draft:
    """A state that is being changed."""

    __slots__ = (
        "cores",
        "good",
        "holds",
        "incarnations",
        "jobs",
        "left",
        "marks",
        "merged",
        "net",
        "parts",
        "queues",
        "reports",
        "schedulers",
        "slots",
        "stories",
    )

    def __init__(self, state: State) -> None:
        self.cores = list(state.cores)
        self.schedulers = list(state.schedulers)
        self.incarnations = list(state.incarnations)
        self.net = list(state.net)
        self.jobs = list(state.jobs)
        self.parts = list(state.parts)
        self.slots = list(state.slots)
        self.queues: list[tuple[int, ...]] = list(state.queues)
        self.reports: list[tuple[tuple[int, str, str], ...]] = list(state.reports)
        self.holds: list[tuple[int, ...]] = list(state.holds)
        self.stories: list[Story] = list(state.stories)
        self.merged = list(state.merged)
        self.good = set(state.good)
        self.left = state.left
        self.marks = state.marks

    def freeze(self) -> State:
        """Return the state that it has become."""
        self.net.sort()
        self.jobs.sort()
        self.parts.sort()
        return State(
            tuple(self.cores),
            (self.schedulers[0], self.schedulers[1]),
            (self.incarnations[0], self.incarnations[1]),
            tuple(self.net),
            tuple(self.jobs),
            tuple(self.parts),
            tuple(self.slots),
            tuple(self.queues),
            tuple(self.reports),
            tuple(self.holds),
            tuple(self.stories),
            tuple(sorted(self.merged)),
            tuple(sorted(self.good)),
            self.left,
            self.marks,
        )

    def hold(self, site: int, key: int, value: int) -> None:
        """Note whether vLLM counts on a report of this rank."""
        holds = list(self.holds[site])
        holds[key] = value
        self.holds[site] = tuple(holds)


Action = tuple[Any, ...]
"""A name and its arguments."""
