"""The blocks and the copies, and the rules about them (S1, S2, S3).

A block is given to another request at the very moment at which a rank reports it. A job is what the data
path does for one leg: batches one after the other, each begun only while the lease runs, each in the air
for some steps of time. What is read from blocks that are no longer lent, or written from blocks that were
taken away, is spoilt; it must never be reported as received. Into a released block nothing may be written
at all.
"""

from dfirst.protocol.effects import RECEIVED

from .ranks import LegSite, Ranks
from .sites import D, Sites
from .state import (
    AIR_SPOILT,
    COMPUTED,
    GHOST,
    HELD,
    JOB_BROKEN,
    JOB_DIRECT,
    JOB_LANDED,
    JOB_READY,
    JOB_SLOT,
    JOB_SPOILT,
    JOB_STOPPED,
    JOB_WANTED,
    NOTHING,
    ON_P,
    RELEASED,
    RUNNING,
    Draft,
    Job,
    State,
)
from .violation import Violation


class Habits:
    """Promises of the data path and of the host, which mutants give up one at a time."""

    waits_for_failed_batches = True
    """R4: a failure is reported only when nothing of the batch moves any more."""
    one_batch_at_a_time = True
    """R5: what was preempted is not pushed again before the end of the batch that is in the air."""
    fresh_ports = True
    """R6: a restarted process is not reached by copies that were meant for the old one."""
    asks_before_each_batch = True
    """Rule R2: a copy is started only inside its lease."""
    pushes_preempted_again = True
    """R5: what was in the air when its prompt was preempted does not count as sent."""
    waits_for_scatter = True
    """R5: a push is over only when the owner has scattered all that was written."""
    counts_suspension = True
    """R2: a clock goes on while its machine is suspended."""


class Memory:
    """Who may touch which blocks."""

    def __init__(self, sites: Sites, ranks: Ranks, habits: Habits) -> None:
        self.sites = sites
        self.ranks = ranks
        self.habits = habits
        self.layerwise = sites.configuration.layerwise
        self.batches = sites.configuration.batches
        self.staging = sites.configuration.staged
        timing = sites.configuration.timing
        tail = timing.copy_timeout_seconds + timing.stall_allowance_seconds
        self.longest = [int(tail // rate) for rate in sites.rate_of]
        """Steps of time that a batch of each site's may be in the air."""

    # The data path

    def started(self, draft: Draft, leg: int) -> None:
        """A core has a lease and wants the bytes."""
        draft.jobs.append((self.ranks.legs[leg].mover, leg, 0, -1, 0))

    def stopped(self, draft: Draft, leg: int) -> None:
        """A core wants no further batch. A job that has copied everything ends well all the same."""
        for place, job in enumerate(draft.jobs):
            if job[1] == leg and job[0] != GHOST and not self.is_whole(job):
                draft.jobs[place] = (*job[:4], job[4] | JOB_STOPPED)

    def is_whole(self, job: Job) -> bool:
        """Return whether every batch has landed, and was scattered."""
        _, _, begun, age, flags = job
        if self.habits.waits_for_scatter and flags & (JOB_WANTED | JOB_LANDED):
            return False
        return begun == self.batches and age < 0

    def may_begin(self, state: State, job: Job) -> bool:
        """Return whether the data path has a batch to begin."""
        mover, leg, begun, age, flags = job
        if mover == GHOST or flags & (JOB_STOPPED | JOB_BROKEN) or begun >= self.batches:
            return False
        if age >= 0 and (self.habits.one_batch_at_a_time or not flags & AIR_SPOILT):
            return False
        if self._stages(job) and (flags & (JOB_WANTED | JOB_LANDED) or not flags & (JOB_READY | JOB_SLOT)):
            return False
        return not self.layerwise or state.stories[self.ranks.legs[leg].number][COMPUTED] > begun

    # Staging

    def _stages(self, job: Job) -> bool:
        return self.staging and not job[4] & JOB_DIRECT

    def wanted(self, state: State, job: Job) -> int | None:
        """Return the part that the data path asks the owner for next, 0 for its slot alone; None if none."""
        mover, _, begun, age, flags = job
        over = flags & (JOB_STOPPED | JOB_BROKEN | JOB_WANTED)
        if mover == GHOST or not self._stages(job) or age >= 0 or over:
            return None
        if not self.layerwise:
            return None if flags & JOB_READY or begun >= self.batches else begun + 1
        if flags & JOB_LANDED:
            return begun
        return None if flags & JOB_SLOT else 0

    def want(self, draft: Draft, place: int) -> tuple[int, int, int]:
        """Ask for it; return the mover's site, the leg and the part."""
        job = draft.jobs[place]
        mover, leg, begun, age, flags = job
        part = begun if flags & JOB_LANDED else 0 if self.layerwise else begun + 1
        draft.jobs[place] = (mover, leg, begun, age, flags & ~JOB_LANDED | JOB_WANTED)
        return mover, leg, part

    def stage(self, draft: Draft, owner: int, leg: int, part: int) -> None:
        """An owner begins to gather or scatter."""
        held = draft.holds[owner][self.ranks.legs[leg].number] == HELD
        draft.parts.append((owner, leg, part, 0 if held else JOB_SPOILT))

    def staged(self, draft: Draft, place: int) -> tuple[int, int]:
        """An owner is through with a part; return its site and the leg."""
        owner, leg, part, flags = draft.parts.pop(place)
        if not self.layerwise:
            draft.slots[owner] = (leg, -1 if flags & JOB_SPOILT else part)
            return owner, leg
        if flags & JOB_SPOILT:
            self._overwritten(self.ranks.legs[leg], "has a part scattered")
        if draft.slots[owner] == (leg, part):
            draft.slots[owner] = (leg, _scattered(part))
        else:
            self._spoil(draft, leg)
        return owner, leg

    def ready(self, draft: Draft, leg: int, staged: bool) -> None:
        """A mover hears of its part."""
        for place, (mover, other, begun, age, flags) in enumerate(draft.jobs):
            if other != leg or mover == GHOST or not flags & JOB_WANTED:
                continue
            flags &= ~JOB_WANTED
            if not staged and begun and self.layerwise:
                flags |= JOB_BROKEN
            elif not staged:
                flags |= JOB_DIRECT
            else:
                flags |= JOB_SLOT if self.layerwise else JOB_READY
                owner = self.ranks.legs[leg].owner
                if self.layerwise and begun and draft.slots[owner] != (leg, _scattered(begun)):
                    flags |= JOB_SPOILT
            draft.jobs[place] = (mover, other, begun, age, flags)

    def give_up(self, draft: Draft, place: int) -> None:
        """A reader does not wait for its part any more, and reads directly."""
        mover, leg, begun, age, flags = draft.jobs[place]
        draft.jobs[place] = (mover, leg, begun, age, flags & ~JOB_WANTED | JOB_DIRECT)

    def _in_slot(self, draft: Draft, leg: int, part: int) -> bool:
        return draft.slots[self.ranks.legs[leg].owner] == (leg, part)

    def may_land(self, job: Job) -> bool:
        """Return whether the batch in the air may land well."""
        _, _, _, age, flags = job
        return age >= 0 and not flags & JOB_BROKEN

    def may_end(self, job: Job) -> bool:
        """Return whether the data path can say that nothing of this job moves any more."""
        mover, _, _, age, flags = job
        if mover == GHOST:
            return False
        if age >= 0:
            early = flags & JOB_BROKEN and not self.habits.waits_for_failed_batches
            return bool(early or (flags & JOB_BROKEN and age >= self.longest[mover]))
        return bool(flags & (JOB_STOPPED | JOB_BROKEN)) or self.is_whole(job)

    def begin(self, draft: Draft, place: int) -> None:
        """Ask whether the lease runs, and begin a batch."""
        mover, leg, begun, age, flags = draft.jobs[place]
        site = self.ranks.legs[leg]
        if self.habits.asks_before_each_batch and not self.ranks.lease_runs(draft.cores[mover], leg):
            draft.jobs[place] = (mover, leg, begun, age, flags | JOB_STOPPED)
            return
        self._check_mine(draft, site)
        reachable = self._owner_is(draft, site)
        if not reachable and (self.habits.fresh_ports or draft.cores[site.owner] < 0):
            draft.jobs[place] = (mover, leg, begun, age, flags | JOB_BROKEN)
            return
        lent = reachable and draft.holds[site.owner][site.number] == HELD
        if self._stages(draft.jobs[place]):
            # The owner's blocks are not touched, its slot is.
            lent = lent or self.layerwise or self._in_slot(draft, leg, begun + 1)
            if self.layerwise:
                draft.slots[site.owner] = NOTHING
        if self.layerwise and not lent:
            self._overwritten(site, "begins to write")
        if age >= 0:
            draft.jobs.append((GHOST, leg, begun, age, AIR_SPOILT))
            flags &= ~AIR_SPOILT
        if not self.layerwise and not lent:
            flags |= AIR_SPOILT
        draft.jobs[place] = (mover, leg, begun + 1, 0, flags)

    def land(self, draft: Draft, place: int) -> None:
        """The batch in the air has arrived whole."""
        mover, leg, begun, _, flags = draft.jobs[place]
        staged = self._stages(draft.jobs[place])
        if staged and self.layerwise:
            draft.slots[self.ranks.legs[leg].owner] = (leg, begun)
        if mover == GHOST:
            del draft.jobs[place]
            if not staged:
                self._spoil(draft, leg)
            return
        if staged and not self.layerwise and not self._in_slot(draft, leg, begun):
            flags |= AIR_SPOILT
        if staged:
            flags = flags & ~JOB_READY | (JOB_LANDED if self.layerwise else 0)
        if flags & AIR_SPOILT:
            flags &= ~AIR_SPOILT
            if not self.layerwise or not self.habits.pushes_preempted_again:
                flags |= JOB_SPOILT
        draft.jobs[place] = (mover, leg, begun, -1, flags)

    def end(self, draft: Draft, place: int) -> tuple[int, int, bool]:
        """Take a job off the data path; return its mover's site, its leg and whether all went well."""
        mover, leg, begun, age, flags = draft.jobs.pop(place)
        if age >= 0 and age < self.longest[mover]:
            draft.jobs.append((GHOST, leg, begun, age, flags))
        ok = not flags & (JOB_STOPPED | JOB_BROKEN)
        site = self.ranks.legs[leg]
        unscattered = self.layerwise and flags & (JOB_WANTED | JOB_LANDED)
        if ok and not flags & JOB_SPOILT and not unscattered:
            draft.good.add((site.mover, site.owner, site.number))
        return mover, leg, ok

    def age(self, draft: Draft) -> None:
        """A step of time passes for what is in the air."""
        kept = []
        for mover, leg, begun, age, flags in draft.jobs:
            longest = self.longest[self.ranks.legs[leg].mover]
            if mover != GHOST or age < longest:
                kept.append((mover, leg, begun, age + 1 if 0 <= age < longest else age, flags))
        draft.jobs = kept

    def _spoil(self, draft: Draft, leg: int) -> None:
        """Old bytes have landed over new ones."""
        if not self.layerwise:
            return
        site = self.ranks.legs[leg]
        draft.good.discard((site.mover, site.owner, site.number))
        for place, job in enumerate(draft.jobs):
            if job[1] == leg and job[2] and job[0] != GHOST:
                draft.jobs[place] = (*job[:4], job[4] | JOB_SPOILT)

    # The blocks

    def preempted(self, draft: Draft, key: int) -> None:
        """P's blocks were given to others in mid-prompt: what is in the air carries garbage."""
        for place, (mover, leg, begun, age, flags) in enumerate(draft.jobs):
            if mover != GHOST and self.ranks.legs[leg].number == key:
                flags |= AIR_SPOILT if age >= 0 else 0
                again = 0 if self.habits.pushes_preempted_again else begun
                draft.jobs[place] = (mover, leg, again, age, flags)

    def released(self, draft: Draft, site: int, key: int, outcome: str) -> None:
        """A rank reports: from here on the blocks are somebody else's."""
        name = f"{self.sites.names[site]} reports {outcome} of {self.sites.keys[key].transfer_id}"
        if draft.holds[site][key] != HELD:
            raise Violation("S3", f"{name}, and vLLM has the blocks already")
        draft.hold(site, key, RELEASED)
        for place, job in enumerate(draft.jobs):
            leg = self.ranks.legs[job[1]]
            if job[3] >= 0 and leg.number == key:
                self._check_air(draft, place, leg, site, name)
        self._check_parts(draft, site, key, name)
        if outcome == RECEIVED:
            wanted = {pair for pair in self.sites.legs(key) if site in pair}
            missing = [pair for pair in wanted if (*pair, key) not in draft.good]
            if missing:
                mover, owner = missing[0]
                text = f"{name}, but not every byte between {self.sites.names[mover]} and "
                raise Violation("S1", f"{text}{self.sites.names[owner]} is there and right")

    def _check_parts(self, draft: Draft, site: int, key: int, name: str) -> None:
        for place, (owner, leg, part, flags) in enumerate(draft.parts):
            if owner != site or self.ranks.legs[leg].number != key:
                continue
            if self.layerwise:
                raise Violation("S2", f"{name} while a part is scattered into the blocks")
            draft.parts[place] = (owner, leg, part, flags | JOB_SPOILT)

    def _check_air(self, draft: Draft, place: int, leg: LegSite, site: int, name: str) -> None:
        engine = self.sites.engine_of[site]
        mine = leg.mover == site and draft.incarnations[engine] == leg.mover_incarnation
        lent = leg.owner == site and draft.incarnations[engine] == leg.owner_incarnation
        lent = lent and not self._stages(draft.jobs[place])
        if engine == D and (mine if not self.layerwise else lent):
            raise Violation("S2", f"{name} while a copy can still land in the blocks")
        if mine:
            raise Violation("S1", f"{name} while a copy still reads from the blocks")
        if lent:
            job = draft.jobs[place]
            draft.jobs[place] = (*job[:4], job[4] | AIR_SPOILT)

    def held(self, draft: Draft, site: int, key: int) -> None:
        """vLLM has given a request these blocks and counts on a report."""
        draft.hold(site, key, HELD)
        if self.sites.engine_of[site] == D:
            draft.good = {entry for entry in draft.good if entry[2] != key or site not in entry[:2]}

    def crashed(self, draft: Draft, engine: int) -> None:
        """An engine's processes are gone. What they had in the air may still land elsewhere; what was copied
        to or from them is broken.
        """
        kept = []
        for mover, leg, begun, age, flags in draft.jobs:
            ends = self.ranks.legs[leg]
            if self.sites.engine_of[ends.owner] == engine:
                if mover != GHOST:
                    kept.append((mover, leg, begun, -1, flags | JOB_BROKEN))
            elif self.layerwise and age >= 0:
                kept.append((GHOST, leg, begun, age, flags))
        draft.jobs = kept
        sites = self.sites.of_engine[engine]
        draft.parts = [part for part in draft.parts if part[0] not in sites]
        for site in sites:
            draft.slots[site] = NOTHING
        if engine == D:
            draft.good.clear()
        for site in sites:
            draft.holds[site] = tuple(0 for _ in draft.holds[site])

    def _owner_is(self, draft: Draft, leg: LegSite) -> bool:
        engine = self.sites.engine_of[leg.owner]
        return draft.cores[leg.owner] >= 0 and draft.incarnations[engine] == leg.owner_incarnation

    def _check_mine(self, draft: Draft, leg: LegSite) -> None:
        """The mover's own blocks must be its own."""
        held = draft.holds[leg.mover][leg.number] == HELD
        running = self.layerwise and draft.stories[leg.number][ON_P] == RUNNING
        if not held and not running:
            name = self.sites.names[leg.mover]
            if self.layerwise:
                raise Violation("S1", f"{name} begins to push blocks that it has handed back")
            raise Violation("S2", f"{name} begins to read into blocks that it has handed back")

    def _overwritten(self, leg: LegSite, verb: str) -> None:
        mover, owner = self.sites.names[leg.mover], self.sites.names[leg.owner]
        raise Violation("S2", f"{mover} {verb} into blocks that {owner} has released")


def _scattered(part: int) -> int:
    """Return what a slot is said to hold when a part has been scattered from it."""
    return -1 - part
