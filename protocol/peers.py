"""The engines that this rank has met: their directories, and the plan with each."""

from .messages import Sender
from .plan import LayoutMismatch, PairPlan, plan_pair
from .shards import Directory, RankEntry, layout_digest
from .tokens import holds_any

MAX_DIRECTORIES = 1024
"""How many directories are kept; the one that was used longest ago goes first. A restarted engine has a new
one each time.
"""


class PeerBook:
    """Directories by their digests, and pair plans; filled at first contact, read for every request."""

    def __init__(self) -> None:
        self.own: Directory | None = None
        self.own_digest = ""
        self._directories: dict[str, Directory] = {}
        self._plans: dict[tuple[str, str], PairPlan | LayoutMismatch] = {}

    def set_own(self, directory: Directory) -> None:
        """Take this rank's own engine."""
        self.own = directory
        self.own_digest = layout_digest(directory)

    def learn(self, directory: Directory) -> str:
        """Remember an engine's directory; return its digest."""
        digest = layout_digest(directory)
        self._directories[digest] = directory
        if len(self._directories) > MAX_DIRECTORIES:
            oldest = next(iter(self._directories))
            del self._directories[oldest]
            self._plans = {pair: plan for pair, plan in self._plans.items() if oldest not in pair}
        return digest

    def known(self, digest: str) -> bool:
        """Return whether both this engine's own directory and that one are here."""
        return self.own is not None and digest in self._directories

    def directory(self, digest: str) -> Directory:
        """Return a directory that is known."""
        return self._directories[digest]

    def rank(self, digest: str, rank: int) -> RankEntry:
        """Return a rank's entry in a directory that is known."""
        return next(entry for entry in self._directories[digest].ranks if entry.rank == rank)

    def holds_tokens(self, rank: int, tokens: range) -> bool:
        """Return whether a rank of this engine holds any of these tokens; True while that is not known."""
        if self.own is None:
            return True
        return any(entry.rank == rank and holds_any(entry.shard, tokens) for entry in self.own.ranks)

    def holds(self, digest: str, sender: Sender) -> bool:
        """Return whether the sender is a rank of the directory, by engine, number and incarnation."""
        directory = self._directories.get(digest)
        if directory is None or directory.engine_id != sender.engine_id:
            return False
        return any(
            entry.rank == sender.rank and entry.incarnation == sender.incarnation for entry in directory.ranks
        )

    def plan(self, digest: str, own_side: str) -> PairPlan:
        """Return the plan with an engine; ``own_side`` is prefill or decode. Raises ``LayoutMismatch``."""
        own = self.own
        if own is None:
            raise RuntimeError("a plan was asked for before this engine's own directory was told")
        self._directories[digest] = self._directories.pop(digest)
        pair = (self.own_digest, digest) if own_side == "prefill" else (digest, self.own_digest)
        found = self._plans.get(pair)
        if found is None:
            other = self._directories[digest]
            prefill, decode = (own, other) if own_side == "prefill" else (other, own)
            try:
                found = plan_pair(prefill, decode)
            except LayoutMismatch as mismatch:
                found = mismatch
            self._plans[pair] = found
        if isinstance(found, LayoutMismatch):
            raise found.with_traceback(None)
        return found
