"""What vLLM and the router do with a request: the story of each transfer, told to the real scheduler cores.

vLLM merges what the ranks report: when all have, the scheduler hears one outcome, once; one failure fails.
"""

from dfirst.protocol.commands import Command
from dfirst.protocol.effects import FAILED, SENT

from .memory import Memory
from .ranks import DEAD, Ranks
from .schedulers import Schedulers
from .sites import D, P, Sites
from .state import (
    ABORTING,
    ANNOUNCED,
    COMPUTE_LATE,
    COMPUTED,
    D_LATE,
    D_NUMBER,
    DONE,
    FLAGS,
    HELD,
    IDLE,
    OFFERED,
    ON_D,
    ON_P,
    OVER,
    P_LATE,
    P_NUMBER,
    P_TWICE,
    RUNNING,
    TWICE,
    Action,
    Draft,
    State,
)
from .violation import Violation


class Requests:
    """vLLM's schedulers and the router of a world."""

    def __init__(self, sites: Sites, ranks: Ranks, schedulers: Schedulers, memory: Memory) -> None:
        self.sites = sites
        self.ranks = ranks
        self.schedulers = schedulers
        self.memory = memory
        self.configuration = sites.configuration
        self.layerwise = sites.configuration.layerwise

    # What may happen

    def moves(self, state: State, key: int) -> list[Action]:
        """Return what the story goes on with by itself."""
        story = state.stories[key]
        on_p, on_d = story[ON_P], story[ON_D]
        found: list[Action] = []
        if on_p == IDLE and self._alive(state, P) and (not self.layerwise or story[FLAGS] & ANNOUNCED):
            found.append(("prefill", key))
        if on_p == RUNNING:
            computed = story[COMPUTED] == self.configuration.batches
            found.append(("finish", key) if computed else ("compute", key))
        if on_d == IDLE and self._alive(state, D) and self._decode_may_start(story):
            found.append(("decode", key))
        return found

    def holds_up(self, state: State, action: Action) -> bool:
        """Return whether time waits for this part of a story."""
        flags = state.stories[action[1]][FLAGS]
        late = {"prefill": P_LATE, "decode": D_LATE, "compute": COMPUTE_LATE, "finish": COMPUTE_LATE}
        return not flags & late[action[0]]

    def faults(self, state: State, key: int, kinds: tuple[str, ...]) -> list[Action]:
        """Return what people, routers and a busy vLLM may do to the story."""
        story = state.stories[key]
        found: list[Action] = []
        if "late" in kinds:
            found += self._lateness(state, story, key)
        if "abort" in kinds:
            found += self._aborts(state, story, key)
        if "absent" in kinds:
            found += self._absences(state, story, key)
        if "cancel" in kinds and story[ON_P] != IDLE:
            found += [("cancel", key, engine) for engine in self._cancelled(state)]
        if "again" in kinds:
            found += self._agains(state, story, key)
        return found

    def _lateness(self, state: State, story: tuple[int, ...], key: int) -> list[Action]:
        late = {"prefill": P_LATE, "decode": D_LATE, "compute": COMPUTE_LATE, "finish": COMPUTE_LATE}
        moves = self.moves(state, key)
        return [("late", key, late[name]) for name, _ in moves if not story[FLAGS] & late[name]]

    def _aborts(self, state: State, story: tuple[int, ...], key: int) -> list[Action]:
        found: list[Action] = []
        if story[ON_D] == RUNNING:
            found.append(("abort_decode", key))
        if self.layerwise and story[ON_P] == RUNNING:
            found.append(("abort_prefill", key))
            if 0 < story[COMPUTED] < self.configuration.batches:
                found.append(("preempt", key))
        if not self.layerwise and story[ON_P] == IDLE and self._alive(state, P):
            found.append(("abort_prefill", key))
        return found

    def _absences(self, state: State, story: tuple[int, ...], key: int) -> list[Action]:
        found: list[Action] = []
        startable = story[ON_D] == IDLE and self._alive(state, D) and self._decode_may_start(story)
        if startable:
            found.append(("no_decode", key))
            if not self.layerwise:
                found += [("drop_decode", key), ("cached_decode", key)]
        if story[ON_P] == IDLE and (self.layerwise or not self.configuration.prefill_first):
            found.append(("no_prefill", key))
            if self.layerwise and story[FLAGS] & ANNOUNCED and story[ON_D] == RUNNING:
                found.append(("announce_fails", key))
        return found

    def _agains(self, state: State, story: tuple[int, ...], key: int) -> list[Action]:
        found: list[Action] = []
        at_rest = [self._at_rest(state, engine, key) for engine in (P, D)]
        if story[ON_P] in (DONE, OVER) and not story[P_NUMBER] and at_rest[P]:
            found.append(("prefill_again", key))
        if story[ON_D] == OVER and not story[D_NUMBER] and at_rest[D] and story[ON_P] != IDLE:
            found.append(("decode_again", key))
        if story[ON_D] in (RUNNING, ABORTING) and not story[FLAGS] & TWICE:
            found.append(("decode_twice", key))
        if (story[ON_P] == RUNNING or self._held(state, P, key)) and not story[FLAGS] & P_TWICE:
            found.append(("prefill_twice", key))
        return found

    def _at_rest(self, state: State, engine: int, key: int) -> bool:
        sites = self.sites.of_engine[engine]
        held = any(state.holds[site][key] == HELD or state.reports[site] for site in sites)
        return self._alive(state, engine) and not held

    def _held(self, state: State, engine: int, key: int) -> bool:
        return any(state.holds[site][key] == HELD for site in self.sites.of_engine[engine])

    def _cancelled(self, state: State) -> list[int]:
        engines = (P, D) if self.layerwise else (P,)
        return [engine for engine in engines if self._alive(state, engine)]

    def _decode_may_start(self, story: tuple[int, ...]) -> bool:
        return self.layerwise or not self.configuration.prefill_first or story[ON_P] == DONE

    @staticmethod
    def _alive(state: State, engine: int) -> bool:
        return state.schedulers[engine] != DEAD

    # Happening

    def prefill(self, draft: Draft, key: int) -> None:
        """P takes the request; block-wise it computes the whole prompt at once."""
        story = draft.stories[key]
        name = f"p{key}.{story[P_NUMBER]}"
        self._call(draft, P, "seen", P, key, name, story[OFFERED])
        self._call(draft, P, "allocated", name, False)
        if self.layerwise:
            self._tell(draft, key, on_p=RUNNING, computed=0)
            return
        self._call(draft, P, "finished", name, True)
        self._hold(draft, P, key)
        self._tell(draft, key, on_p=DONE)
        if self.configuration.prefill_first:
            self._tell(draft, key, offered=draft.incarnations[P])

    def compute(self, draft: Draft, key: int) -> None:
        """P computes another layer."""
        self._tell(draft, key, computed=draft.stories[key][COMPUTED] + 1)

    def finish(self, draft: Draft, key: int) -> None:
        """P's vLLM finishes the request and leaves its blocks with the connector."""
        self._finish_prefill(draft, key, computed=True)

    def decode(self, draft: Draft, key: int) -> None:
        """D's vLLM allocates blocks and waits for the prompt."""
        story = draft.stories[key]
        name = f"d{key}.{story[D_NUMBER]}"
        offered = story[OFFERED]
        if not self.layerwise and not self.configuration.prefill_first and not story[D_NUMBER]:
            offered = draft.incarnations[P]
        self._call(draft, D, "seen", D, key, name, offered)
        announced = self._call(draft, D, "allocated", name, False)
        self._hold(draft, D, key)
        self._tell(draft, key, on_d=RUNNING, offered=draft.incarnations[D] if announced else offered)
        if announced:
            self._tell(draft, key, flags=draft.stories[key][FLAGS] | ANNOUNCED)

    def prefill_again(self, draft: Draft, key: int) -> None:
        """A second request with the same transfer reaches P."""
        self._tell(draft, key, p_number=1)
        self.prefill(draft, key)

    def decode_again(self, draft: Draft, key: int) -> None:
        """A second request with the same transfer reaches D after the first has ended."""
        self._tell(draft, key, d_number=1)
        self.decode(draft, key)

    def decode_twice(self, draft: Draft, key: int) -> None:
        """A second request with the same transfer reaches D while the first is under way."""
        name = f"d{key}.twice"
        self._call(draft, D, "seen", D, key, name, draft.stories[key][OFFERED])
        self._call(draft, D, "allocated", name, True)
        self._call(draft, D, "finished", name, True)
        self._tell(draft, key, flags=draft.stories[key][FLAGS] | TWICE)

    def prefill_twice(self, draft: Draft, key: int) -> None:
        """A second request with the same transfer reaches P while the first is under way."""
        name = f"p{key}.twice"
        self._call(draft, P, "seen", P, key, name, draft.stories[key][OFFERED])
        self._call(draft, P, "allocated", name, False)
        self._call(draft, P, "finished", name, True)
        self._tell(draft, key, flags=draft.stories[key][FLAGS] | P_TWICE)

    def drop_decode(self, draft: Draft, key: int) -> None:
        """D's request is aborted before it has blocks."""
        self._seen_on_d(draft, key)
        self._call(draft, D, "finished", f"d{key}.0", False)
        self._tell(draft, key, on_d=OVER)

    def cached_decode(self, draft: Draft, key: int) -> None:
        """D has the whole prompt cached and loads nothing."""
        self._seen_on_d(draft, key)
        self._call(draft, D, "cached", f"d{key}.0")
        self._call(draft, D, "finished", f"d{key}.0", True)
        self._tell(draft, key, on_d=OVER)

    def abort_decode(self, draft: Draft, key: int) -> None:
        """D's request is aborted while it loads."""
        self._call(draft, D, "finished", f"d{key}.{draft.stories[key][D_NUMBER]}", False)
        self._tell(draft, key, on_d=ABORTING)

    def abort_prefill(self, draft: Draft, key: int) -> None:
        """P's request is aborted before its prompt is computed."""
        if self.layerwise:
            self._finish_prefill(draft, key, computed=False)
            return
        self._call(draft, P, "seen", P, key, f"p{key}.0", 0)
        self._call(draft, P, "finished", f"p{key}.0", False)
        self._tell(draft, key, on_p=OVER)

    def preempt(self, draft: Draft, key: int) -> None:
        """P's vLLM takes the blocks away in mid-prompt and computes anew."""
        self._tell(draft, key, computed=0)
        self.memory.preempted(draft, key)

    def no_decode(self, draft: Draft, key: int) -> None:
        """The request never reaches D."""
        self._tell(draft, key, on_d=OVER)

    def no_prefill(self, draft: Draft, key: int) -> None:
        """The request never reaches P."""
        self._tell(draft, key, on_p=OVER)

    def announce_fails(self, draft: Draft, key: int) -> None:
        """The router cannot be told of D's blocks."""
        self._call(draft, D, "announce_failed", f"d{key}.{draft.stories[key][D_NUMBER]}")
        self._tell(draft, key, on_p=OVER)

    def late(self, draft: Draft, key: int, flag: int) -> None:
        """A part of the story takes its time."""
        self._tell(draft, key, flags=draft.stories[key][FLAGS] | flag)

    def collect(self, draft: Draft, site: int) -> list[int]:
        """vLLM takes a rank's reports; return the transfers that they were about."""
        taken, draft.reports[site] = draft.reports[site], ()
        for key, outcome, request_id in taken:
            self._merge(draft, site, key, outcome, request_id)
        return [key for key, _, _ in taken]

    def crashed(self, draft: Draft, engine: int) -> None:
        """An engine's scheduler is gone with all its requests."""
        draft.merged = [entry for entry in draft.merged if entry[0] != engine]
        for key, story in enumerate(draft.stories):
            if engine == D:
                self._tell(draft, key, on_d=OVER)
            elif story[ON_P] != IDLE or not self.configuration.prefill_first:
                self._tell(draft, key, on_p=OVER)

    @staticmethod
    def aborting(state: State) -> bool:
        """Return whether vLLM waits for the blocks of an aborted request."""
        return any(story[ON_D] == ABORTING for story in state.stories)

    def waiting(self, state: State) -> list[str]:
        """Return what vLLM still waits for."""
        found = []
        for key, story in enumerate(state.stories):
            if story[ON_D] in (RUNNING, ABORTING):
                found.append(f"the request on D of {self.sites.keys[key].transfer_id}")
            for site, holds in enumerate(state.holds):
                if holds[key] == HELD:
                    found.append(f"blocks of {self.sites.keys[key].transfer_id} on {self.sites.names[site]}")
        return found

    # Helpers

    def _seen_on_d(self, draft: Draft, key: int) -> None:
        self._call(draft, D, "seen", D, key, f"d{key}.0", draft.stories[key][OFFERED])

    def _finish_prefill(self, draft: Draft, key: int, computed: bool) -> None:
        self._call(draft, P, "finished", f"p{key}.{draft.stories[key][P_NUMBER]}", computed)
        self._hold(draft, P, key)
        self._tell(draft, key, on_p=DONE)

    def _merge(self, draft: Draft, site: int, key: int, outcome: str, request_id: str) -> None:
        engine = self.sites.engine_of[site]
        bits, failed = 0, 0
        for entry in draft.merged:
            if entry[:2] == (engine, key):
                _, _, bits, failed = entry
                draft.merged.remove(entry)
                break
        sites = self.sites.of_engine[engine]
        bits |= 1 << (site - sites.start)
        failed |= outcome == FAILED
        if bits != (1 << len(sites)) - 1:
            draft.merged.append((engine, key, bits, int(failed)))
            return
        event = outcome if outcome == SENT else "failed" if failed else "received"
        self._call(draft, engine, "reported", request_id, event)
        if engine == D:
            story = draft.stories[key]
            if request_id != f"d{key}.{story[D_NUMBER]}":
                raise Violation("S6", f"vLLM heard {event} of {request_id}, which is not under way")
            if story[ON_D] == RUNNING:
                self._call(draft, D, "finished", request_id, True)
            self._tell(draft, key, on_d=OVER)

    def _hold(self, draft: Draft, engine: int, key: int) -> None:
        for site in self.sites.of_engine[engine]:
            self.memory.held(draft, site, key)

    def _call(self, draft: Draft, engine: int, hook: str, *arguments: int | str | bool) -> bool:
        call = self.schedulers.call(draft.schedulers[engine], hook, *arguments)
        draft.schedulers[engine] = call.scheduler
        for command in call.commands:
            self._queue(draft, engine, command)
        return call.announced

    def _queue(self, draft: Draft, engine: int, command: Command) -> None:
        number = self.ranks.command(command)
        for site in self.sites.of_engine[engine]:
            draft.queues[site] = (*draft.queues[site], number)

    def _tell(self, draft: Draft, key: int, **changes: int) -> None:
        story = list(draft.stories[key])
        for name, value in changes.items():
            story[PLACES[name]] = value
        draft.stories[key] = tuple(story)  # type: ignore[assignment]


PLACES = {
    "on_p": ON_P,
    "on_d": ON_D,
    "computed": COMPUTED,
    "p_number": P_NUMBER,
    "d_number": D_NUMBER,
    "flags": FLAGS,
    "offered": OFFERED,
}
