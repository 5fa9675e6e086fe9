"""What befalls whole engines: crashes, restarts, machines that stand still, and a router that gives up."""

from dfirst.protocol.messages import Cancel, Sender
from dfirst.protocol.modes import MOVER, OWNER

from .post import ANYONE, ROUTER_SITE, Letter, Post
from .ranks import DEAD, PASS, Ranks
from .requests import Requests
from .sites import Sites
from .state import MUTE, Action, Draft, State

ROUTER_SENDER = Sender("router", -1, "r")


class Calamities:
    """Carries them out on a state."""

    def __init__(self, sites: Sites, ranks: Ranks, post: Post, requests: Requests) -> None:
        self.sites = sites
        self.configuration = sites.configuration
        self.ranks = ranks
        self.post = post
        self.requests = requests
        self.memory = requests.memory
        self.habits = requests.memory.habits
        self.schedulers = requests.schedulers

    def suspend(self, draft: Draft, engine: int) -> None:
        """An engine's machine stands still for a step of time, while the rest of the world goes on."""
        for site, core in enumerate(draft.cores):
            counts = self.habits.counts_suspension or self.sites.engine_of[site] != engine
            if core >= 0 and counts:
                draft.cores[site] = self.ranks.step(core, (PASS, 0)).core
        self.memory.age(draft)

    def cancel(self, draft: Draft, key: int, engine: int) -> None:
        """The router says CANCEL to every rank of an engine."""
        for site in self.sites.of_engine[engine]:
            incarnation = draft.incarnations[engine]
            message = Cancel(
                sender=ROUTER_SENDER,
                key=self.sites.keys[key],
                target_incarnation=self.sites.sender(site, incarnation).incarnation,
                target=OWNER if engine == self.sites.owner else MOVER,
                mode=self.configuration.mode,
                reason="",
            )
            draft.net.append(self.post.write(Letter(ROUTER_SITE, 0, site, ANYONE, message)) * 2)

    def mute(self, draft: Draft, site: int) -> None:
        """From now on nothing arrives of what a rank sends."""
        draft.marks |= MUTE << site

    def strays(self, state: State) -> list[Action]:
        """Return the questions that a rank may ask though the plan has nothing for it there."""
        sites = self.sites
        pairs = [
            (mover, owner) for mover in sites.of_engine[sites.mover] for owner in sites.of_engine[sites.owner]
        ]
        return [
            ("stray", key, mover, owner)
            for key in range(len(state.stories))
            for mover, owner in pairs
            if (mover, owner) not in sites.legs(key) and DEAD not in (state.cores[mover], state.cores[owner])
        ]

    def stray(self, draft: Draft, key: int, mover: int, owner: int) -> None:
        """A rank asks for blocks that the plan has nothing for it in."""
        sites = self.sites
        incarnation = draft.incarnations[sites.mover]
        asked = sites.sender(owner, draft.incarnations[sites.owner])
        message = sites.question(mover, incarnation, asked, sites.keys[key], sequence=1)
        draft.net.append(self.post.write(Letter(mover, incarnation, owner, ANYONE, message)) * 2)

    def die(self, draft: Draft, engine: int) -> None:
        """An engine's processes end and never come back."""
        self._crash(draft, engine)
        for site in self.sites.of_engine[engine]:
            draft.cores[site] = DEAD
        draft.schedulers[engine] = DEAD
        draft.net = [item for item in draft.net if draft.cores[self.post.letters[item >> 1].target] != DEAD]

    def restart(self, draft: Draft, engine: int) -> None:
        """An engine's processes end, and start again as another incarnation that knows nothing."""
        self._crash(draft, engine)
        draft.incarnations[engine] += 1
        for site in self.sites.of_engine[engine]:
            draft.cores[site] = self.ranks.start(site, draft.incarnations[engine])
        draft.schedulers[engine] = self.schedulers.fresh
        draft.net = [item for item in draft.net if self.reachable(draft, self.post.letters[item >> 1])]

    def _crash(self, draft: Draft, engine: int) -> None:
        for site in self.sites.of_engine[engine]:
            draft.queues[site] = ()
            draft.reports[site] = ()
            draft.marks &= ~(2 << site | MUTE << site)
        self.memory.crashed(draft, engine)
        self.requests.crashed(draft, engine)

    def reachable(self, draft: Draft, letter: Letter) -> bool:
        """Return whether anybody is there to read a letter."""
        if draft.cores[letter.target] == DEAD:
            return False
        incarnation = draft.incarnations[self.sites.engine_of[letter.target]]
        return letter.target_incarnation in (ANYONE, incarnation)
