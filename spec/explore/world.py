"""A world: what can happen in a state, and what state comes of it.

Time goes on only when everything that is on time has happened: letters have arrived, commands and reports
were taken, due timers have fired, copies have landed. What is late is late by a fault, and from then on
comes at any time. That keeps a good day short and puts every delay into the count of faults. Nothing is
lost by it: a schedule in which k things are late is explored with k faults.
"""

from dfirst.protocol.effects import FAILED

from .calamities import Calamities
from .configuration import Configuration
from .memory import Habits, Memory
from .numbers import ALWAYS, NOBODYS, WORD, Marked, in_order, renaming_of
from .post import Post
from .ranks import (
    DEAD,
    ENDED,
    HEAR,
    PASS,
    READY,
    REPORT,
    SEND,
    STAGE,
    STAGED,
    START,
    TAKEN,
    TELL,
    TICK,
    WANT,
    Ranks,
    Watcher,
)
from .requests import Requests
from .schedulers import Schedulers
from .sites import NAMES, D, P, Sites
from .state import (
    ASKED,
    GHOST,
    HARSH,
    JOB_BROKEN,
    JOB_SLOW,
    JOB_WANTED,
    LATE,
    MUTE,
    NAMES_FROM,
    NETTED,
    NOTHING,
    SLOWED,
    Action,
    Draft,
    Job,
    State,
)
from .violation import Violation

STORY_MOVES = frozenset(("prefill", "compute", "finish", "decode"))
FREE, DISORDER, FAULT = range(3)
NETWORK_FAULTS = frozenset(("lose", "repeat", "delay", "stray"))
POLITE_FAULTS = frozenset(
    (
        *("abort_decode", "abort_prefill", "drop_decode", "cached_decode", "decode_twice", "prefill_twice"),
        *("cancel", "announce_fails", "preempt"),
    )
)
"""What ends a transfer, or takes no time, without anybody waiting for a time-out."""
DISORDERED = "another order"
KINDS = (
    *("lose", "repeat", "delay", "slow", "break", "suspend P", "suspend D", DISORDERED),
    *("die P", "die D", "restart P", "restart D", "mute P", "mute D", "cancel P", "cancel D"),
    *("late", "late_step", "no_decode", "no_prefill", "drop_decode", "cached_decode", "announce_fails"),
    *("abort_decode", "abort_prefill", "preempt", "prefill_again", "decode_again", "decode_twice"),
    *("prefill_twice", "give_up", "slow_part", "break_part", "stray"),
)
"""Kinds of faults that a world may keep apart."""


class World:
    """One configuration, ready to be stepped through."""

    def __init__(self, configuration: Configuration, habits: Habits | None = None) -> None:
        self.configuration = configuration
        self.habits = habits or Habits()
        self.sites = Sites(configuration)
        self.watcher = Watcher()
        self.post = Post(self.sites)
        self.ranks = Ranks(self.sites, self.post, self.watcher)
        self.schedulers = Schedulers(self.sites, self.watcher)
        self.memory = Memory(self.sites, self.ranks, self.habits)
        self.requests = Requests(self.sites, self.ranks, self.schedulers, self.memory)
        self.calamities = Calamities(self.sites, self.ranks, self.post, self.requests)
        self._kinds = frozenset(configuration.kinds)
        self._polite = POLITE_FAULTS
        if not configuration.layerwise and not configuration.prefill_first:
            self._polite -= {"abort_prefill"}  # D has come already, and nobody tells it.

    def first(self) -> State:
        """Return the state in which nothing has happened yet."""
        sites, keys = range(self.configuration.ranks), range(self.configuration.transfers)
        return State(
            cores=tuple(self.ranks.start(site, 0) for site in sites),
            schedulers=(self.schedulers.fresh, self.schedulers.fresh),
            incarnations=(0, 0),
            net=(),
            jobs=(),
            parts=(),
            slots=tuple(NOTHING for _ in sites),
            queues=tuple(() for _ in sites),
            reports=tuple(() for _ in sites),
            holds=tuple(tuple(0 for _ in keys) for _ in sites),
            stories=tuple((0, 0, 0, 0, 0, 0, 0) for _ in keys),
            merged=(),
            good=(),
            left=self.configuration.faults,
            marks=ASKED if self.configuration.unfit or self.configuration.disagree else 0,
        )

    # What can happen

    def moves(self, state: State) -> tuple[list[Action], list[Action]]:
        """Return what happens without any fault: what time waits for, and what may come at any time. The
        first one of the former, or else of the latter, is what happens next once faults stop.
        """
        prompt: list[Action] = []
        late: list[Action] = []
        for site, queue in enumerate(state.queues):
            if queue:
                (late if state.marks >> (site + 1) & 1 else prompt).append(("step", site))
        due = self.ranks.due
        prompt += [("timers", site) for site, core in enumerate(state.cores) if core >= 0 and due[core]]
        prompt += [("collect", site) for site, reports in enumerate(state.reports) if reports]
        last = -1
        for item in state.net:
            if item != last:
                (late if item & 1 else prompt).append(("deliver", item))
                last = item
        lingering: list[Action] = []
        for place, job in enumerate(state.jobs):
            self._job_moves(state, place, job, prompt, late, lingering)
        for place, part in enumerate(state.parts):
            (late if part[3] & JOB_SLOW else prompt).append(("staged", place))
        for key in range(len(state.stories)):
            for move in self.requests.moves(state, key):
                (prompt if self.requests.holds_up(state, move) else late).append(move)
        if not prompt:
            late.append(("tick",))
        return prompt, late + lingering

    def _job_moves(
        self,
        state: State,
        place: int,
        job: Job,
        prompt: list[Action],
        late: list[Action],
        lingering: list[Action],
    ) -> None:
        """Where kinds of faults are kept apart, slow copies stay slow when faults stop."""
        memory = self.memory
        mover, leg, _, age, flags = job
        relaxed = late if flags & JOB_SLOW or mover == GHOST else prompt
        if memory.may_end(job):
            prompt.append(("end", place))
        if memory.may_land(job):
            at_its_longest = age >= memory.longest[self.ranks.legs[leg].mover] and mover != GHOST
            slow = self.configuration.told_apart and flags & JOB_SLOW and mover != GHOST
            (prompt if at_its_longest else lingering if slow else relaxed).append(("land", place))
        if memory.wanted(state, job) is not None:
            relaxed.append(("want", place))
        if memory.may_begin(state, job):
            relaxed.append(("begin", place))

    def choices(self, state: State) -> list[tuple[Action, int]]:
        """Return everything that can happen, each with what it costs, what costs nothing first.

        In an orderly world letters and steps come in one fixed order, and to take another one is a fault too.
        """
        prompt, late = self.moves(state)
        if not self.configuration.orderly or not prompt:
            found = [(action, FREE) for action in (*prompt, *late)]
        else:
            found = [(prompt[0], FREE)]
            if state.left:
                found += [(action, DISORDER) for action in (*prompt[1:], *late)]
        if state.left:
            found += [(action, FAULT) for action in self.faults(state)]
        return found

    def faults(self, state: State) -> list[Action]:
        """Return the faults that may come now."""
        kinds = self._kinds
        found: list[Action] = []
        self._network_faults(state, kinds, found)
        for place, (mover, _, _, age, flags) in enumerate(state.jobs):
            if mover == GHOST:
                continue
            if "slow" in kinds and not flags & (JOB_SLOW | JOB_BROKEN):
                found.append(("slow", place))
            if "slow" in kinds and flags & JOB_WANTED and not self.configuration.layerwise:
                found.append(("give_up", place))
            if "break" in kinds and age >= 0 and not flags & JOB_BROKEN:
                found.append(("break", place))
        if "late" in kinds:
            queues = enumerate(state.queues)
            found += [("late_step", site) for site, q in queues if q and not state.marks >> (site + 1) & 1]
        for place, part in enumerate(state.parts):
            if "slow" in kinds and not part[3] & JOB_SLOW:
                found.append(("slow_part", place))
            if "break" in kinds:
                found.append(("break_part", place))
        for key in range(len(state.stories)):
            found += self.requests.faults(state, key, self.configuration.kinds)
        for engine in (P, D):
            if state.schedulers[engine] != DEAD and not state.incarnations[engine]:
                found += [(name, engine) for name in ("die", "restart") if name in kinds]
            if state.schedulers[engine] != DEAD and "suspend" in kinds and state.jobs:
                found.append(("suspend", engine))
        if "mute" in kinds:
            cores = enumerate(state.cores)
            found += [("mute", site) for site, core in cores if core >= 0 and not state.marks & MUTE << site]
        if "stray" in kinds:
            found += self.calamities.strays(state)
        return found

    @staticmethod
    def _network_faults(state: State, kinds: frozenset[str], found: list[Action]) -> None:
        last = -1
        for item in state.net:
            if item == last:
                continue
            last = item
            if "lose" in kinds:
                found.append(("lose", item))
            if not item & 1:
                if "repeat" in kinds:
                    found.append(("repeat", item))
                if "delay" in kinds:
                    found.append(("delay", item))

    # What comes of it

    def apply(self, state: State, action: Action, cost: int) -> State:
        """Return the state after an action; raise ``Violation`` if a rule is broken by it."""
        draft = Draft(state)
        if cost != FREE:
            draft.left -= 1
            if cost == FAULT:
                draft.marks |= self._mark(action[0])
            if self.configuration.told_apart:
                draft.marks |= self._kind(action, cost)
        self._do(draft, action)
        self._name_numbers(draft)
        return draft.freeze()

    def _mark(self, fault: str) -> int:
        if fault in NETWORK_FAULTS:
            return NETTED
        if fault in self._polite:
            return ASKED
        if fault in ("slow", "slow_part"):
            return SLOWED
        return LATE if fault in ("late", "late_step") else HARSH

    def _kind(self, action: Action, cost: int) -> int:
        """Return the bit of a kind of fault; what befalls one engine is another kind than the same on the
        other.
        """
        name = str(action[0]) if cost == FAULT else DISORDERED
        if name == "cancel":
            name += f" {NAMES[action[2]]}"
        elif name in ("die", "restart", "suspend"):
            name += f" {NAMES[action[1]]}"
        elif name == "mute":
            name += f" {NAMES[self.sites.engine_of[action[1]]]}"
        return 1 << (NAMES_FROM + KINDS.index(name))

    @staticmethod
    def named_faults(bits: int) -> str:
        """Return which kinds of faults these bits of a state's marks name."""
        return ", ".join(name for bit, name in enumerate(KINDS) if bits >> bit & 1)

    def _do(self, draft: Draft, action: Action) -> None:
        name = action[0]
        if name in STORY_MOVES:
            getattr(self.requests, name)(draft, action[1])
            return
        method = getattr(self, f"_{name}", None) or getattr(self.calamities, name, None)
        (method or getattr(self.requests, name))(draft, *action[1:])

    def _step(self, draft: Draft, site: int) -> None:
        command, *rest = draft.queues[site]
        draft.queues[site] = tuple(rest)
        if not rest:
            draft.marks &= ~(2 << site)
        self._take(draft, site, (TELL, command))

    def _timers(self, draft: Draft, site: int) -> None:
        self._take(draft, site, (TICK, 0))

    def _collect(self, draft: Draft, site: int) -> None:
        for key in self.requests.collect(draft, site):
            self._take(draft, site, (TAKEN, key))

    def _deliver(self, draft: Draft, item: int) -> None:
        draft.net.remove(item)
        self._take(draft, self.post.letters[item >> 1].target, (HEAR, item >> 1))

    def _repeat(self, draft: Draft, item: int) -> None:
        draft.net.append(item | 1)

    def _delay(self, draft: Draft, item: int) -> None:
        draft.net.remove(item)
        draft.net.append(item | 1)

    def _lose(self, draft: Draft, item: int) -> None:
        draft.net.remove(item)

    def _want(self, draft: Draft, place: int) -> None:
        mover, leg, part = self.memory.want(draft, place)
        self._take(draft, mover, (WANT, leg, part))

    def _give_up(self, draft: Draft, place: int) -> None:
        self.memory.give_up(draft, place)

    def _staged(self, draft: Draft, place: int) -> None:
        owner, leg = self.memory.staged(draft, place)
        self._take(draft, owner, (STAGED, leg, 1))

    def _break_part(self, draft: Draft, place: int) -> None:
        owner, leg, _, _ = draft.parts.pop(place)
        self._take(draft, owner, (STAGED, leg, 0))

    def _slow_part(self, draft: Draft, place: int) -> None:
        draft.parts[place] = (*draft.parts[place][:3], draft.parts[place][3] | JOB_SLOW)

    def _begin(self, draft: Draft, place: int) -> None:
        self.memory.begin(draft, place)

    def _land(self, draft: Draft, place: int) -> None:
        self.memory.land(draft, place)

    def _end(self, draft: Draft, place: int) -> None:
        mover, leg, ok = self.memory.end(draft, place)
        self._take(draft, mover, (ENDED, leg, int(ok)))

    def _slow(self, draft: Draft, place: int) -> None:
        draft.jobs[place] = (*draft.jobs[place][:4], draft.jobs[place][4] | JOB_SLOW)

    def _break(self, draft: Draft, place: int) -> None:
        draft.jobs[place] = (*draft.jobs[place][:4], draft.jobs[place][4] | JOB_BROKEN)

    def _late_step(self, draft: Draft, site: int) -> None:
        draft.marks |= 2 << site

    def _tick(self, draft: Draft) -> None:
        for site, core in enumerate(draft.cores):
            if core >= 0:
                draft.cores[site] = self.ranks.step(core, (PASS, 0)).core
        self.memory.age(draft)

    # What a core asks for

    def _take(self, draft: Draft, site: int, event: tuple[int, ...]) -> None:
        step = self.ranks.step(draft.cores[site], event)
        draft.cores[site] = step.core
        if step.gave_up and not draft.marks & (HARSH | NETTED):
            name = self.sites.names[site]
            raise Violation("R9", f"{name} gives a peer up that answers, be it with WAIT")
        if step.ran_out and not draft.marks & (HARSH | NETTED | LATE):
            name = self.sites.names[site]
            raise Violation("R1", f"{name} lets a lease run out whose renewals are all answered")
        for effect in step.effects:
            kind, value = effect[0], effect[1]
            if kind == SEND:
                mute = draft.marks & MUTE << site
                if not mute and self.calamities.reachable(draft, self.post.letters[value]):
                    draft.net.append(value * 2)
            elif kind == START:
                self.memory.started(draft, value)
            elif kind == STAGE:
                self.memory.stage(draft, site, value, effect[2])
            elif kind == READY:
                self.memory.ready(draft, value, effect[2])
            elif kind == REPORT:
                self._report(draft, site, value, effect[2], effect[3])
            else:
                self.memory.stopped(draft, value)

    def _report(self, draft: Draft, site: int, key: int, outcome: str, request_id: str) -> None:
        self.memory.released(draft, site, key, outcome)
        used = self.configuration.faults - draft.left
        harsh = draft.marks & (HARSH | ASKED | LATE | SLOWED)
        if outcome == FAILED and not harsh and used <= self.configuration.harmless_faults:
            text = (
                f"{self.sites.names[site]} fails a transfer that met nothing worse than {used} lost letters"
            )
            raise Violation("R9", text)
        draft.reports[site] = (*draft.reports[site], (key, outcome, request_id))

    # Numbers

    def _name_numbers(self, draft: Draft) -> None:
        """Call the numbers of each thread 1, 2, 3, wherever they are, and those that nobody looks at -1."""
        ranks, post = self.ranks, self.post
        found: dict[int, int] = {}
        for core in draft.cores:
            if core >= 0:
                for thread, mask in ranks.numbers[core].held:
                    found[thread] = found.get(thread, 0) | mask
        for place, item in enumerate(draft.net):
            marked = post.marked[item >> 1]
            if marked is None:
                continue
            counts = marked.counts == ALWAYS or self._awaited(draft, marked)
            granted = marked.grant > 0 and (counts or marked.counts == WORD)
            if counts and marked.number > 0:
                found[marked.thread] = found.get(marked.thread, 0) | 1 << marked.number
            if granted:
                found[marked.grants] = found.get(marked.grants, 0) | 1 << marked.grant
            if not counts and (marked.number > 0 or (marked.grant > 0 and not granted)):
                grant = marked.grant if granted else NOBODYS
                draft.net[place] = post.renamed(item >> 1, NOBODYS, grant) * 2 | item & 1
        for thread, mask in found.items():
            if not in_order(mask):
                self._rename(draft, thread, mask)

    def _awaited(self, draft: Draft, marked: Marked) -> bool:
        core = draft.cores[marked.site]
        if core < 0 or marked.number <= 0 or self.ranks.incarnation[core] != marked.incarnation:
            return False
        numbers = self.ranks.numbers[core]
        open_ones = numbers.words if marked.counts == WORD else numbers.asked
        return bool(open_ones.get(marked.thread, 0) >> marked.number & 1)

    def _rename(self, draft: Draft, thread: int, mask: int) -> None:
        renaming = renaming_of(mask)
        names = dict(renaming)
        for site, core in enumerate(draft.cores):
            if core >= 0 and any(thread == other for other, _ in self.ranks.numbers[core].held):
                draft.cores[site] = self.ranks.renamed(core, thread, renaming)
        for place, item in enumerate(draft.net):
            marked = self.post.marked[item >> 1]
            if marked is None or thread not in (marked.thread, marked.grants):
                continue
            number, grant = marked.number, marked.grant
            number = names.get(number, number) if thread == marked.thread else number
            grant = names.get(grant, grant) if thread == marked.grants else grant
            if (number, grant) != (marked.number, marked.grant):
                draft.net[place] = self.post.renamed(item >> 1, number, grant) * 2 | item & 1

    # What must hold at the end

    def ended(self, state: State) -> bool:
        """Return whether every live rank has freed everything and vLLM waits for nothing (rule L1)."""
        over = self.ranks.over
        if any(core >= 0 and not over[core] for core in state.cores):
            return False
        if any(job[0] != GHOST for job in state.jobs):
            return False
        return not self.requests.waiting(state)

    def given_up(self, state: State) -> bool:
        """Return whether a request is aborted, or a rank knows that its transfer cannot be whole."""
        doomed = self.ranks.doomed
        return self.requests.aborting(state) or any(core >= 0 and doomed[core] for core in state.cores)

    def unended(self, state: State) -> str:
        """Return what has not ended."""
        found = list(self.requests.waiting(state))
        for site, core in enumerate(state.cores):
            if core >= 0 and not self.ranks.over[core]:
                states = [transfer.state for transfer in self.ranks.codes[core].transfers]
                found.append(f"{self.sites.names[site]} in {', '.join(states)}")
        found += ["a copy" for job in state.jobs if job[0] != GHOST]
        return "; ".join(found)
