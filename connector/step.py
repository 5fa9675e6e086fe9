"""What the scheduler side sends to the ranks with each step."""

from dataclasses import dataclass, field

import msgspec

from ..protocol.commands import Command
from ..protocol.messages import TransferKey
from ..protocol.shards import Directory


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a pushed prompt that this step computes."""

    key: TransferKey
    block_ids: tuple[int, ...]
    """The request's blocks from its first token to the end of this chunk."""
    end_token: int
    """Tokens of the prompt that are computed after this step."""
    last: bool
    """Whether the prompt is complete then."""


@dataclass
class StepMetadata:
    """One step's message to every rank. To vLLM it is a ``KVConnectorMetadata`` (``vllm_connector.py``)."""

    directory: Directory | None = None
    """This engine, told with the first step."""
    commands: tuple[Command, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    preempted: frozenset[TransferKey] = field(default_factory=frozenset)
    """Pushes whose blocks are given to others before this step runs."""
    may_wait: bool = False
    """Whether the step computes nothing and holds nobody up: vLLM only asks what has arrived meanwhile."""
