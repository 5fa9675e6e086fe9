"""Whole transfers between engines of real rank cores, with the bytes of their copies.

The network and the clock are those of ``tests/protocol/world.py``. Blocks that their owner gives back are
used by others at once: whatever is read from them later is wrong, and who writes into them is noticed.
"""

import msgspec
from dfirst.protocol import copies as copying
from dfirst.protocol.commands import AcceptPush, FinishPush, OfferBlocks, StartPull, StartPush, remote_of
from dfirst.protocol.effects import FAILED, RECEIVED, SENT, StartCopies
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.shards import Directory

from tests.protocol.world import World

from .judge import Move, Wrong, begin, check_arrived
from .memory import FOREIGN
from .request import Request, Side, directory

ROUNDS = 400
"""Deliveries after which a transfer that still talks is said to hang."""


class Cores(World):
    """Every rank of two engines, each with its core; ``move`` has their memory."""

    def __init__(self, prefill: Side, decode: Side, request: Request) -> None:
        super().__init__()
        self.move: Move = begin(prefill, decode, request)
        self.key = TransferKey(request.transfer_id or "empty", 0)
        self.cores.clear()
        self.copies.clear()
        self.engines = {
            "P": reachable(directory(self.move.prefill, "P")),
            "D": reachable(directory(self.move.decode, "D")),
        }
        for name, engine in self.engines.items():
            for entry in engine.ranks:
                self.start(name, entry)
        self.ends: dict[str, list[str]] = {rank: [] for rank in self.cores}
        self.copied: list[str] = []
        """The ranks that copied something, one entry a leg."""
        self._heard = 0

    def pull(self, offered_tokens: int | None = None) -> None:
        """Move the prompt block-wise, one decode rank after the other.

        ``offered_tokens``: the prefill side speaks of so many, and so refuses the decode side's questions.
        """
        request = self.move.request
        for rank in self.ranks("P"):
            self.give(
                rank,
                OfferBlocks(
                    key=self.key,
                    request_id="p",
                    block_ids=request.prefill_blocks[0],
                    prompt_tokens=offered_tokens or request.tokens,
                ),
            )
        for rank in self.ranks("D"):
            self.give(
                rank,
                StartPull(
                    key=self.key,
                    request_id="d",
                    remote=remote_of(self.engines["P"]),
                    block_ids=request.decode_blocks[0],
                    prompt_tokens=request.tokens,
                    cached_tokens=request.cached,
                ),
            )
        self._run("D")

    def push(self) -> None:
        """Move the prompt layer-wise; each rank's copies of all layers count as one."""
        request = self.move.request
        for rank in self.ranks("D"):
            self.give(
                rank,
                AcceptPush(
                    key=self.key,
                    request_id="d",
                    block_ids=request.decode_blocks[0],
                    prompt_tokens=request.tokens,
                    cached_tokens=request.cached,
                ),
            )
        for rank in self.ranks("P"):
            self.give(
                rank,
                StartPush(
                    key=self.key,
                    request_id="p",
                    remote=remote_of(self.engines["D"]),
                    prompt_tokens=request.tokens,
                    cached_tokens=request.cached,
                ),
            )
        for rank in self.ranks("P"):
            self.give(rank, FinishPush(self.key))
        self._run("P")

    def _run(self, movers: str) -> None:
        self.deliver(ROUNDS)
        self._hear_reports()
        for rank in self.ranks(movers):
            for started in self.copies[rank]:
                self._copy(rank, movers, started)
            self.finish_copies(rank)
            self.deliver(ROUNDS)
            self._hear_reports()

    def _copy(self, rank: str, movers: str, started: StartCopies) -> None:
        self.copied.append(rank)
        if not started.remote_blocks:
            return  # As the connector does, which finds that too few blocks were lent.
        own, other = int(rank[1:]), started.peer.rank
        prefill_rank, decode_rank = (other, own) if movers == "D" else (own, other)
        lent, local = started.remote_blocks, started.local_blocks
        if movers == "P":
            # A push knows its own blocks from the steps that compute them.
            local = self.move.request.prefill_blocks[0]
        source_blocks, target_blocks = (lent, local) if movers == "D" else (local, lent)
        moved = copying.copies(
            started.plan,
            self.move.prefill_shards[prefill_rank],
            self.move.decode_shards[decode_rank],
            source_blocks,
            target_blocks,
            range(started.cached_tokens, started.prompt_tokens),
        )
        self.move.perform(moved, prefill_rank, decode_rank)

    def _hear_reports(self) -> None:
        for rank, outcome in self.reports[self._heard :]:
            self.ends[rank].append(outcome)
            if outcome == SENT:
                memory = self.move.prefill.ranks[int(rank[1:])]
                for tensor in memory.tensors:
                    tensor.view[list(self.move.request.prefill_blocks[tensor.group])] = FOREIGN
            if outcome == RECEIVED and any(
                started.peer.rank == int(rank[1:])
                for mover in self.ranks("P")
                for started in self.copies[mover]
            ):
                raise Wrong(f"{rank} says that it has received the prompt while a writer is at work")
        self._heard = len(self.reports)

    def check_over(self) -> None:
        """Every rank has said one word on the transfer, all went well, and every byte is where it belongs."""
        for rank, said in self.ends.items():
            wanted = [SENT] if rank.startswith("P") else [RECEIVED]
            if said != wanted:
                raise Wrong(f"{rank} reports {said or 'nothing'} instead of {wanted}")
        check_arrived(self.move)

    def check_failed(self) -> None:
        """Every decode rank has said that it failed, and has copied nothing."""
        if self.copied:
            raise Wrong(f"{self.copied} copy what nobody lent")
        for rank in self.ranks("D"):
            if self.ends[rank] != [FAILED]:
                raise Wrong(f"{rank} reports {self.ends[rank] or 'nothing'} instead of a failure")


def reachable(engine: Directory) -> Directory:
    """Return the engine with addresses that the simulated network knows."""
    ranks = tuple(
        msgspec.structs.replace(entry, host=engine.engine_id, port=entry.rank) for entry in engine.ranks
    )
    return msgspec.structs.replace(engine, ranks=ranks)


def pull_with_cores(prefill: Side, decode: Side, request: Request) -> None:
    """Move a prompt block-wise between real cores and check everything."""
    cores = Cores(prefill, decode, request)
    cores.pull()
    cores.check_over()


def push_with_cores(prefill: Side, decode: Side, request: Request) -> None:
    """Move a prompt layer-wise between real cores and check everything."""
    cores = Cores(prefill, decode, request)
    cores.push()
    cores.check_over()
