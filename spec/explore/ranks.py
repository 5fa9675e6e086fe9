"""The rank cores of a world, each of their situations a number, and what an event makes of it.

A core's step depends on nothing but its own situation and the event (rule F1), so every step is taken on
the real core once and looked up ever after. That, and not a model of the core, is what makes millions of
states affordable.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

from dfirst.protocol.binding import Observer
from dfirst.protocol.commands import (
    Collected,
    Command,
    CopyEnded,
    CoreEvent,
    LegKey,
    MessageReceived,
    PartStaged,
    PartWanted,
)
from dfirst.protocol.effects import Effect, PartReady, Reply, Report, Send, StageBlocks, StartCopies
from dfirst.protocol.messages import Layout, Message
from dfirst.protocol.peers import PeerBook
from dfirst.protocol.rank import RankCore
from dfirst.protocol.specification import TransitionSpec
from dfirst.protocol.stages import Slot

from .answers import Answers, Reaction, check_forgotten, check_parked, check_states, check_times, lease_ends
from .codec import decode, encode
from .codes import CoreCode
from .numbers import CoreNumbers, Renaming
from .post import Post
from .sites import Sites
from .violation import Violation

HEAR, TELL, ENDED, TAKEN, TICK, PASS, WANT, STAGED = range(8)
SEND, START, STOP, REPORT, STAGE, READY = range(6)
ONE_SLOT = (Slot(1 << 30, 1, 64),)
DEAD = -1


class Step(NamedTuple):
    """What an event made of a core."""

    core: int
    effects: tuple[tuple[Any, ...], ...]
    gave_up: bool = False
    """Whether the query time-out ended a wait."""
    ran_out: bool = False
    """Whether a mover's lease has run out."""


class LegSite(NamedTuple):
    """A leg with the sites and incarnations of its two ends."""

    key: LegKey
    number: int
    """The transfer's number."""
    mover: int
    mover_incarnation: int
    owner: int
    owner_incarnation: int


class Watcher:
    """Hears every step of every machine; an event that the spec does not expect is a violation."""

    def __init__(self) -> None:
        self.rows: set[str] = set()
        self.just_taken: list[tuple[str, str]] = []
        self.unexpected: set[str] = set()
        self.strict = True

    def stepped(self, entity: Any, row: TransitionSpec, source: str) -> None:
        self.rows.add(row.id)
        self.just_taken.append((entity.machine.spec.name, row.event))

    def unheard(self, entity: Any, event: str, expected: bool) -> None:
        if not expected:
            text = f"{entity.machine.spec.name} has no row and no word for {event} in {entity.state}"
            self.unexpected.add(text)
            if self.strict:
                raise Violation("F3", text)


class Unheard:
    """Hears of the steps that a core takes on the side."""

    def stepped(self, entity: Any, row: TransitionSpec, source: str) -> None: ...

    def unheard(self, entity: Any, event: str, expected: bool) -> None: ...


class Ranks:
    """All situations of all cores of one world."""

    def __init__(self, sites: Sites, post: Post, watcher: Watcher) -> None:
        self.sites = sites
        self.post = post
        self.watcher = watcher
        self.answers = Answers(sites, self._ask)
        self.codes: list[CoreCode] = []
        self.site: list[int] = []
        self.incarnation: list[int] = []
        self.due: list[bool] = []
        """Whether a timer should fire now."""
        self.over: list[bool] = []
        """Whether every transfer is freed or forgotten."""
        self.empty: list[bool] = []
        """Whether nothing of any transfer is remembered."""
        self.doomed: list[bool] = []
        """Whether a transfer is known here to be lost."""
        self.commands: list[Command] = []
        self.legs: list[LegSite] = []
        self.numbers: list[CoreNumbers] = []
        """The numbers of questions and last words that it has."""
        self._renamed: dict[tuple[int, int, Renaming], int] = {}
        self._ids: dict[tuple[int, int, CoreCode], int] = {}
        self._steps: dict[tuple[Hashable, ...], Step] = {}
        self._runs: dict[tuple[int, int], bool] = {}
        self._command_ids: dict[Command, int] = {}
        self._leg_ids: dict[tuple[int, int, LegKey], int] = {}
        self._books: dict[tuple[int, int, tuple[str, ...]], PeerBook] = {}
        self._directories = {}
        for engine in (0, 1):
            for incarnation in range(4):
                self._directories[sites.digest(engine, incarnation)] = sites.directory(engine, incarnation)

    # What cores, commands and legs are called

    def start(self, site: int, incarnation: int) -> int:
        """Return a rank that has just started and was told its engine's directory."""
        known: tuple[str, ...] = ()
        engine, configuration = self.sites.engine_of[site], self.sites.configuration
        met = configuration.met or (configuration.owner_met and engine == self.sites.owner)
        if met and not incarnation:
            known = (self.sites.digest(1 - engine, 0),)
        return self._number(site, incarnation, CoreCode(known=known))

    def command(self, command: Command) -> int:
        """Return the number of a command."""
        number = self._command_ids.get(command)
        if number is None:
            number = self._command_ids[command] = len(self.commands)
            self.commands.append(command)
        return number

    # Steps

    def step(self, core: int, event: tuple[int, ...]) -> Step:
        """Return what an event makes of a core."""
        known = (core, event)
        found = self._steps.get(known)
        if found is None:
            found = self._steps[known] = self._take(core, event)
        return found

    def lease_runs(self, core: int, leg: int) -> bool:
        """Return whether a copy of this leg may be started now."""
        found = self._runs.get((core, leg))
        if found is None:
            made = self.revive(core)
            old = made.timing.clock_step_seconds if self.sites.configuration.coarse else 0.0
            found = self._runs[core, leg] = made.lease_runs(self.legs[leg].key, made.now - old)
        return found

    def renamed(self, core: int, thread: int, renaming: Renaming) -> int:
        """Return a core in which the numbers of one thread are called otherwise."""
        known = (core, thread, renaming)
        found = self._renamed.get(known)
        if found is None:
            site, incarnation = self.site[core], self.incarnation[core]
            own = self.sites.sender(site, incarnation).incarnation
            code = self.post.threads.renamed(self.codes[core], own, thread, renaming)
            found = self._renamed[known] = self._number(site, incarnation, code)
        return found

    def revive(self, core: int, own_book: bool = False, observer: Observer | None = None) -> RankCore:
        """Return a core as a living object, at time 0."""
        site, incarnation, code = self.site[core], self.incarnation[core], self.codes[core]
        book = self._book(site, incarnation, code.known)
        if own_book:
            book = _copied(book)
        timing = self.sites.configuration.timing
        slots = ONE_SLOT if self.sites.configuration.staged else ()
        sender = self.sites.sender(site, incarnation)
        return decode(code, timing, sender, book, observer or self.watcher, slots)

    def _take(self, core: int, event: tuple[int, ...]) -> Step:
        layout = event[0] == HEAR and isinstance(self.post.letters[event[1]].message, Layout)
        made = self.revive(core, own_book=layout)
        if event[0] == PASS:
            self._check_leases(core)
            made.now = float(self.sites.rate_of[self.site[core]])
            return Step(self._keep(core, made), ())
        self.watcher.just_taken.clear()
        try:
            effects = made.tick(0.0) if event[0] == TICK else made.handle(self._event(event), 0.0)
        except Violation:
            raise
        except Exception as error:
            raise Violation("F3", f"the core ended with {type(error).__name__}: {error}") from error
        number = self._keep(core, made)
        self._check(event, core, number, effects)
        taken = self.watcher.just_taken
        gave_up = any(event == "silence" for _, event in taken)
        ran_out = ("mover_leg", "lease_end") in taken
        return Step(number, self._effects(core, effects), gave_up, ran_out)

    def _check_leases(self, core: int) -> None:
        """When time goes on, no mover goes on in a lease that has run out."""
        if not self.due[core] and any(until <= 0 for until in lease_ends(self.codes[core]).values()):
            name = self.sites.names[self.site[core]]
            raise Violation("R2", f"{name} goes on with copies after the end of its lease")

    def _ask(self, core: int, message: Message) -> list[Message]:
        """Return what a core would answer to a message; nobody hears of it."""
        made = self.revive(core, observer=Unheard())
        effects = made.handle(MessageReceived(message, b"aside.0"), 0.0)
        return [effect.message for effect in effects if isinstance(effect, Send | Reply)]

    def _check(self, event: tuple[int, ...], core: int, became: int, effects: list[Effect]) -> None:
        """Hold a step against the rules that speak of single steps."""
        site = self.site[core]
        sender = self.sites.sender(site, self.incarnation[core])
        reaction = Reaction(core, became, self.codes[core], self.codes[became], effects)
        check_parked(self.sites.names[site], reaction)
        if event[0] == HEAR:
            self.answers.check_heard(site, sender, reaction, self.post.letters[event[1]].message)
        elif event[0] == TELL:
            self.answers.check_told(site, sender, reaction, self.commands[event[1]])
        elif event[0] == TAKEN:
            self.answers.check_collected(site, sender, reaction, self.sites.keys[event[1]])
        elif event[0] == TICK:
            check_forgotten(self.sites.names[site], reaction)
            check_times(self.sites.names[site], reaction)
            self.answers.check_released(site, sender, reaction)

    def _event(self, event: tuple[int, ...]) -> CoreEvent:
        kind, number = event[:2]
        if kind == HEAR:
            letter = self.post.letters[number]
            return MessageReceived(letter.message, self.post.route(letter))
        if kind == TELL:
            return self.commands[number]
        if kind == ENDED:
            return CopyEnded(self.legs[number].key, bool(event[2]), "")
        if kind == WANT:
            # The list of runs stands for the part: its one address is the part's number.
            starts, lengths = (_packed(event[2]), _packed(1)) if event[2] else (b"", b"")
            return PartWanted(leg=self.legs[number].key, place=0, starts=starts, lengths=lengths)
        if kind == STAGED:
            leg = self.legs[number]
            mover = self.sites.sender(leg.mover, leg.mover_incarnation)
            return PartStaged(key=leg.key.key, mover=mover, place=0, reason="" if event[2] else "broken")
        return Collected(self.sites.keys[number])

    def _effects(self, core: int, effects: list[Effect]) -> tuple[tuple[Any, ...], ...]:
        site, incarnation = self.site[core], self.incarnation[core]
        found: list[tuple[Any, ...]] = []
        for effect in effects:
            if isinstance(effect, Send | Reply):
                letter = self.post.send(site, incarnation, effect)
                if letter is not None:
                    found.append((SEND, letter))
            elif isinstance(effect, Report):
                number = self.sites.key_number[effect.key]
                found.append((REPORT, number, effect.outcome, effect.request_id))
            elif isinstance(effect, StartCopies):
                found.append((START, self._leg(site, incarnation, effect.leg)))
            elif isinstance(effect, PartReady):
                leg = self._leg(site, incarnation, effect.leg)
                found.append((READY, leg, effect.slot is not None))
            elif isinstance(effect, StageBlocks):
                mover = effect.mover
                key = LegKey(effect.key, *self._owner_of(site, incarnation))
                leg = self._leg(
                    self.sites.site(mover.engine_id, mover.rank),
                    self.sites.incarnation_of(mover.incarnation),
                    key,
                )
                found.append((STAGE, leg, int.from_bytes(effect.starts, "little")))
            else:
                found.append((STOP, self._leg(site, incarnation, effect.leg)))
        return tuple(found)

    def _owner_of(self, site: int, incarnation: int) -> tuple[str, int, str]:
        sender = self.sites.sender(site, incarnation)
        return sender.engine_id, sender.rank, sender.incarnation

    def _leg(self, site: int, incarnation: int, key: LegKey) -> int:
        number = self._leg_ids.get((site, incarnation, key))
        if number is None:
            number = self._leg_ids[site, incarnation, key] = len(self.legs)
            owner, owner_incarnation = (
                self.sites.site(key.engine_id, key.rank),
                self.sites.incarnation_of(key.incarnation),
            )
            transfer = self.sites.key_number[key.key]
            self.legs.append(LegSite(key, transfer, site, incarnation, owner, owner_incarnation))
        return number

    # Keeping

    def _keep(self, core: int, made: RankCore) -> int:
        site = self.site[core]
        return self._number(site, self.incarnation[core], encode(made, self.sites.rate_of[site]))

    def _number(self, site: int, incarnation: int, code: CoreCode) -> int:
        known = (site, incarnation, code)
        number = self._ids.get(known)
        if number is None:
            check_states(self.sites.names[site], code)
            number = self._ids[known] = len(self.codes)
            self.codes.append(code)
            self.site.append(site)
            self.incarnation.append(incarnation)
            own = self.sites.sender(site, incarnation).incarnation
            self.numbers.append(self.post.threads.in_core(code, own))
            due = bool(code.timers) and code.timers[0].at <= 0
            self.due.append(due or any(renewal.due == 0.0 for renewal in code.renewals))
            self.empty.append(not code.transfers and not code.renewals and not code.timers)
            self.doomed.append(_doomed(code))
            freed = all(transfer.state == "FREED" for transfer in code.transfers)
            self.over.append(freed and not any(lease.has_slot for lease in code.leases))
        return number

    def _book(self, site: int, incarnation: int, known: tuple[str, ...]) -> PeerBook:
        engine = self.sites.engine_of[site]
        book = self._books.get((engine, incarnation, known))
        if book is None:
            book = self._books[engine, incarnation, known] = PeerBook()
            book.set_own(self.sites.directory(engine, incarnation))
            for digest in known:
                book.learn(self._directories[digest])
        return book


def _doomed(code: CoreCode) -> bool:
    """Return whether a leg has failed, or a lease ended without DONE."""
    failed = any(leg.failure for leg in code.legs)
    return failed or any(lease.state in ("STOPPED", "EXPIRED") for lease in code.leases)


def _packed(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _copied(book: PeerBook) -> PeerBook:
    made = PeerBook()
    made.own, made.own_digest = book.own, book.own_digest
    made._directories, made._plans = dict(book._directories), dict(book._plans)
    return made
