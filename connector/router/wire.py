"""The ``kv_transfer_params`` that the router writes, and the parts that it reads of those the engines write.

What an engine wrote is handed on byte for byte (``msgspec.Raw``): the router reads only the addresses
at which it may have to cancel.
"""

import msgspec

from .cancel import RankAddress


class PrefillAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Block-wise, to the prefill engine: compute the prompt and keep its blocks to be pulled."""

    transfer_id: str
    attempt: int
    do_remote_decode: bool = True
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[int] | None = None
    remote_host: str | None = None
    remote_port: int | None = None


class DecodeAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Layer-wise, to the decode engine: make room, then post where to the metaserver."""

    transfer_id: str
    attempt: int
    metaserver: str
    do_remote_prefill: bool = True
    do_remote_decode: bool = False


class PullAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Block-wise D-first, to the decode engine: pull from these ranks when they have computed the prompt."""

    transfer_id: str
    attempt: int
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_ranks: tuple[RankAddress, ...]
    layout_digest: str
    do_remote_prefill: bool = True
    do_remote_decode: bool = False


class PrefillAnswer(msgspec.Struct):
    """Of a prefill engine's answer, the one field that matters."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class PrefillGrant(msgspec.Struct):
    """Of a prefill engine's parameters, what the router needs. Other connectors leave out the last two."""

    do_remote_prefill: bool = False
    transfer_id: str | None = None
    remote_ranks: list[RankAddress] = []


class MetaserverPost(msgspec.Struct, kw_only=True):
    """Of what a decode engine posts, what the router needs; the whole of it goes to the prefill engine."""

    transfer_id: str
    attempt: int
    do_remote_prefill: bool
    do_remote_decode: bool
    remote_ranks: list[RankAddress]
