"""The two engines as the explored worlds know them: names, directories, addresses.

A site is a rank's place: P's ranks are numbered first, then D's. An engine is 0 for P and 1 for D. A
restart gives all ranks of an engine their next incarnation.
"""

from functools import cache, cached_property

from dfirst.protocol.commands import RemoteEngine, remote_ranks_of
from dfirst.protocol.lease import write_tail_seconds
from dfirst.protocol.messages import Query, Sender, TransferKey
from dfirst.protocol.plan import PairPlan, plan_pair
from dfirst.protocol.shards import Directory, RankEntry, Region, Shard, layout_digest

from .configuration import Configuration

P, D = 0, 1
BLOCK_SIZE = 4
PROMPT_TOKENS = 4
NAMES = ("P", "D")


class Sites:
    """What never changes in a world."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.of_engine = (
            range(configuration.prefill_ranks),
            range(configuration.prefill_ranks, configuration.ranks),
        )
        self.engine_of = [P] * configuration.prefill_ranks + [D] * configuration.decode_ranks
        self.rate_of = [(configuration.prefill_rate, configuration.decode_rate)[e] for e in self.engine_of]
        self.names = [self._name(site) for site in range(configuration.ranks)]
        self.site_named = {name: site for site, name in enumerate(self.names)}
        self.keys = [
            TransferKey("t0", number) if configuration.attempts else TransferKey(f"t{number}", 0)
            for number in range(configuration.transfers)
        ]
        self.key_number = {key: number for number, key in enumerate(self.keys)}
        self.mover, self.owner = (P, D) if configuration.layerwise else (D, P)
        self.cached_tokens = PROMPT_TOKENS if configuration.all_cached else 0
        self._directories: dict[tuple[int, int], Directory] = {}
        self._digests: dict[tuple[int, int], str] = {}
        self._incarnations: dict[str, tuple[int, int]] = {}

    @cached_property
    def plan(self) -> PairPlan:
        """Who copies what from whom; the same for all incarnations."""
        return plan_pair(self.directory(P, 0), self.directory(D, 0))

    @cache  # noqa: B019 (a world's sites live as long as the world)
    def legs(self, key: int) -> frozenset[tuple[int, int]]:
        """Return the (mover site, owner site) pairs that have bytes to move for a transfer."""
        plan = self.plan.request(self.keys[key].transfer_id, PROMPT_TOKENS, self.cached_tokens)
        first = self.configuration.prefill_ranks
        pairs = ((leg.prefill_rank, first + leg.decode_rank) for leg in plan.legs)
        return frozenset(pair if self.mover == P else pair[::-1] for pair in pairs)

    def directory(self, engine: int, incarnation: int) -> Directory:
        """Return an engine's directory."""
        found = self._directories.get((engine, incarnation))
        if found is None:
            ranks = len(self.of_engine[engine])
            model = "m-other" if self.configuration.unfit and engine == D else "m"
            found = directory(NAMES[engine], ranks, self.configuration.heads, incarnation, model)
            self._directories[engine, incarnation] = found
            for entry in found.ranks:
                self._incarnations[entry.incarnation] = (engine, incarnation)
        return found

    def digest(self, engine: int, incarnation: int) -> str:
        """Return the name of an engine's directory."""
        found = self._digests.get((engine, incarnation))
        if found is None:
            found = self._digests[engine, incarnation] = layout_digest(self.directory(engine, incarnation))
        return found

    def remote(self, engine: int, incarnation: int) -> RemoteEngine:
        """Return an engine as a router names it."""
        ranks = remote_ranks_of(self.directory(engine, incarnation))
        return RemoteEngine(NAMES[engine], self.digest(engine, incarnation), ranks)

    def sender(self, site: int, incarnation: int) -> Sender:
        """Return how a rank signs its messages."""
        engine = self.engine_of[site]
        rank = site - self.of_engine[engine].start
        return Sender(NAMES[engine], rank, self.directory(engine, incarnation).ranks[rank].incarnation)

    def question(self, mover: int, incarnation: int, owner: Sender, key: TransferKey, sequence: int) -> Query:
        """Return the QUERY of the rank at a mover's site, in this incarnation of it, to an owner."""
        configuration = self.configuration
        return Query(
            sender=self.sender(mover, incarnation),
            key=key,
            sequence=sequence,
            target_incarnation=owner.incarnation,
            mode=configuration.mode,
            layout_digest=self.digest(self.mover, incarnation),
            prompt_tokens=PROMPT_TOKENS,
            cached_tokens=self.cached_tokens,
            tail_seconds=write_tail_seconds(configuration.timing) if configuration.layerwise else 0.0,
        )

    def incarnation_of(self, name: str) -> int:
        """Return the number of an incarnation that some directory names."""
        return self._incarnations[name][1]

    def site(self, engine_id: str, rank: int) -> int:
        """Return the site of a rank."""
        return self.of_engine[NAMES.index(engine_id)].start + rank

    def _name(self, site: int) -> str:
        engine = self.engine_of[site]
        return f"{NAMES[engine]}{site - self.of_engine[engine].start}"


def directory(name: str, ranks: int, heads: int, incarnation: int, model: str = "m") -> Directory:
    """Return an engine of ``ranks`` ranks that hold ``heads`` KV heads between them, one layer deep."""
    entries = []
    for rank in range(ranks):
        count = max(heads // ranks, 1)
        region = Region(0, "kv", 1 << 20, 64, count * 64, 64, 16, 16)
        shard = Shard(
            total_kv_heads=heads,
            first_kv_head=rank * heads // ranks,
            kv_head_count=count,
            block_size=BLOCK_SIZE,
            regions=(region,),
        )
        entry = RankEntry(
            rank=rank,
            host=name,
            port=rank,
            incarnation=f"{name}{rank}.{incarnation}",
            data_address=f"{name}:{rank}",
            shard=shard,
        )
        entries.append(entry)
    layout = f"TP {ranks}, {heads} KV heads"
    return Directory(engine_id=name, model=model, layout=layout, ranks=tuple(entries))
