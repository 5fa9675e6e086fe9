"""The rank cores of a world, each of their situations a number, and what an event makes of it.

A core's step depends on nothing but its own situation and the event (rule F1), so every step is taken on
the real core once and looked up ever after. That, and not a model of the core, is what makes millions of
states affordable.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

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
from dfirst.protocol.messages import (
    Cancel,
    Done,
    Gone,
    Layout,
    Message,
    Metadata,
    Query,
    Renew,
    Stage,
    Staged,
    Stopped,
)
from dfirst.protocol.peers import PeerBook
from dfirst.protocol.rank import RankCore
from dfirst.protocol.specification import TransitionSpec
from dfirst.protocol.stages import Slot

from .codec import (
    KNOWN,
    LEASE_PARTS,
    LEASE_SLOT,
    LEASES,
    MOVERS,
    OWNERS,
    PARKED,
    RENEWALS,
    TIMERS,
    TRANSFER_STATE,
    Code,
    decode,
    encode,
)
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
        self.just_taken: list[str] = []
        self.unexpected: set[str] = set()
        self.strict = True

    def stepped(self, entity: Any, row: TransitionSpec, source: str) -> None:
        self.rows.add(row.id)
        self.just_taken.append(row.event)

    def unheard(self, entity: Any, event: str, expected: bool) -> None:
        if not expected:
            text = f"{entity.machine.spec.name} has no row and no word for {event} in {entity.state}"
            self.unexpected.add(text)
            if self.strict:
                raise Violation("F3", text)


class Ranks:
    """All situations of all cores of one world."""

    def __init__(self, sites: Sites, post: Post, watcher: Watcher) -> None:
        self.sites = sites
        self.post = post
        self.watcher = watcher
        self.codes: list[Code] = []
        self.site: list[int] = []
        self.incarnation: list[int] = []
        self.due: list[bool] = []
        """Whether a timer should fire now."""
        self.over: list[bool] = []
        """Whether every transfer is freed or forgotten."""
        self.empty: list[bool] = []
        """Whether nothing of any transfer is remembered."""
        self.commands: list[Command] = []
        self.legs: list[LegSite] = []
        self.numbers: list[CoreNumbers] = []
        """The numbers of questions and last words that it has."""
        self._renamed: dict[tuple[int, int, Renaming], int] = {}
        self._ids: dict[tuple[int, int, Code], int] = {}
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
        if self.sites.configuration.met and not incarnation:
            known = (self.sites.digest(1 - self.sites.engine_of[site], 0),)
        return self._number(site, incarnation, ((), (), (), (), known))

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
            found = self._runs[core, leg] = made.lease_runs(self.legs[leg].key, made.now)
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

    def revive(self, core: int, own_book: bool = False) -> RankCore:
        """Return a core as a living object, at time 0."""
        site, incarnation, code = self.site[core], self.incarnation[core], self.codes[core]
        book = self._book(site, incarnation, code[KNOWN])
        if own_book:
            book = _copied(book)
        timing = self.sites.configuration.timing
        slots = ONE_SLOT if self.sites.configuration.staged else ()
        return decode(code, timing, self.sites.sender(site, incarnation), book, self.watcher, slots)

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
        if event[0] == HEAR:
            self._check_answer(core, number, self.post.letters[event[1]].message, effects)
        self._check_parked(core, number, effects)
        gave_up = "silence" in self.watcher.just_taken
        return Step(number, self._effects(core, effects), gave_up)

    def _check_leases(self, core: int) -> None:
        """When time goes on, no mover goes on in a lease that has run out."""
        if not self.due[core] and any(until <= 0 for until in _lease_ends(self.codes[core]).values()):
            name = self.sites.names[self.site[core]]
            raise Violation("R2", f"{name} goes on with copies after the end of its lease")

    def _check_answer(self, core: int, became: int, message: Message, effects: list[Effect]) -> None:
        """What was meant for another incarnation changes nothing and is told so; last words are answered."""
        said = {type(effect.message).__name__ for effect in effects if isinstance(effect, Send | Reply)}
        name = self.sites.names[self.site[core]]
        meant = getattr(message, "target_incarnation", None)
        mine = self.sites.sender(self.site[core], self.incarnation[core]).incarnation
        if meant is not None and meant != mine:
            if became != core:
                raise Violation("S5", f"{type(message).__name__} for {meant} changes something at {mine}")
            if isinstance(message, Query | Renew) and not said & {"Gone", "Renewed"}:
                raise Violation("R6", f"{name} does not say that {meant} is gone")
        before, after = _lease_ends(self.codes[core]), _lease_ends(self.codes[became])
        if any(after.get(leg, until) < until for leg, until in before.items()):
            raise Violation("R1", f"{type(message).__name__} moves the end of a lease back at {name}")
        if isinstance(message, Metadata) and message.sequence in _asked(self.codes[core], message):
            asking = _asked(self.codes[became], message)
            if asking and "Query" not in said:
                raise Violation("R9", f"{name} does not ask again at once for a grant that was too short")
        if isinstance(message, Stage) and self._refused(effects) and _has_room(self.codes[core], message):
            raise Violation("R9", f"{name} has a slot and does not lend it")
        if isinstance(message, Done | Stopped | Cancel) and "Ack" not in said:
            raise Violation("R8", f"{name} does not acknowledge {type(message).__name__}")

    @staticmethod
    def _refused(effects: list[Effect]) -> bool:
        answers = (effect.message for effect in effects if isinstance(effect, Reply))
        return any(isinstance(answer, Staged) and not answer.slot_places for answer in answers)

    def _check_parked(self, core: int, became: int, effects: list[Effect]) -> None:
        """Who was told to wait for blocks that will not come hears it at once."""
        answers = sum(isinstance(effect, Reply) and isinstance(effect.message, Gone) for effect in effects)
        over = {owner[1] for owner in self.codes[became][OWNERS] if owner[TRANSFER_STATE] == "FREED"}
        waited = [owner for owner in self.codes[core][OWNERS] if owner[TRANSFER_STATE] == "PARKED"]
        if sum(len(owner[PARKED]) for owner in waited if owner[1] in over) > answers:
            raise Violation("R9", f"{self.sites.names[self.site[core]]} forgets a question that is parked")

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

    def _number(self, site: int, incarnation: int, code: Code) -> int:
        known = (site, incarnation, code)
        number = self._ids.get(known)
        if number is None:
            number = self._ids[known] = len(self.codes)
            self.codes.append(code)
            self.site.append(site)
            self.incarnation.append(incarnation)
            own = self.sites.sender(site, incarnation).incarnation
            self.numbers.append(self.post.threads.in_core(code, own))
            timers = code[TIMERS]
            due = bool(timers) and timers[0][0] <= 0
            self.due.append(due or any(renewal[5] == 0.0 for renewal in code[RENEWALS]))
            transfers = (*code[MOVERS], *code[OWNERS])
            self.empty.append(not transfers and not code[RENEWALS] and not timers)
            freed = all(transfer[TRANSFER_STATE] == "FREED" for transfer in transfers)
            self.over.append(freed and not _slot_lent(code))
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


def _asked(code: Code, answer: Metadata) -> list[int]:
    """Return the numbers of the questions that this answer's owner has not answered."""
    legs = (leg for mover in code[MOVERS] if mover[1] == answer.key for leg in mover[-1])
    return [number for leg in legs if leg[0].incarnation == answer.sender.incarnation for number, _ in leg[5]]


def _lease_ends(code: Code) -> dict[Any, float]:
    """Return the end of each lease under which a mover copies."""
    legs = ((mover[1], leg) for mover in code[MOVERS] for leg in mover[-1])
    return {(key, leg[0]): leg[4] for key, leg in legs if leg[3] == "COPYING"}


def _slot_lent(code: Code) -> bool:
    return any(lease[LEASE_SLOT] for owner in code[OWNERS] for lease in owner[LEASES])


def _has_room(code: Code, stage: Stage) -> bool:
    """Return whether no slot is lent and this part was not refused before."""
    leases = [lease for owner in code[OWNERS] for lease in owner[LEASES]]
    known = {sequence for lease in leases for _, (sequence, _) in lease[LEASE_PARTS]}
    return not _slot_lent(code) and stage.sequence not in known


def _packed(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _copied(book: PeerBook) -> PeerBook:
    made = PeerBook()
    made.own, made.own_digest = book.own, book.own_digest
    made._directories, made._plans = dict(book._directories), dict(book._plans)
    return made
