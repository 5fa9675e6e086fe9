"""``kv_transfer_params``: what routers and engines write on a request, in the names that today's routers
use.
"""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..protocol.commands import RemoteEngine, RemoteRank
from ..protocol.messages import TransferKey
from ..protocol.scheduler import TransferRequest, mode_of

MAX_NAME_LENGTH = 256
"""Of a transfer id or a host name: they come from outside, and go into messages, logs and memory."""
MAX_RANKS = 65536


class TransferParams(msgspec.Struct, kw_only=True):
    """The parameters that this connector reads; others are left alone."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    transfer_id: str = ""
    attempt: int = 0
    metaserver: str | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_ranks: tuple[RemoteRank, ...] | None = None
    layout_digest: str | None = None
    remote_cached_tokens: int = 0


class NamedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transfer's blocks are; what follows says for whom."""

    do_remote_prefill: bool
    do_remote_decode: bool
    transfer_id: str
    attempt: int
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_ranks: tuple[RemoteRank, ...]
    layout_digest: str
    remote_block_ids: tuple[tuple[int, ...], ...]
    """A hint; only METADATA grants a read or a write (rule R10)."""


class OfferedBlocks(NamedBlocks, frozen=True, kw_only=True):
    """A prefill engine's answer, block-wise: blocks to be read."""

    remote_request_id: str
    remote_num_tokens: int
    tp_size: int
    pp_size: int
    dcp_size: int
    transfer_mode: str


class AnnouncedBlocks(NamedBlocks, frozen=True, kw_only=True):
    """What a decode engine posts to the metaserver, layer-wise, and the prefill engine gets as parameters:
    blocks to be written.
    """

    request_id: str
    remote_block_size: int
    remote_cached_tokens: int
    remote_tp_size: int
    remote_pcp_size: int
    remote_dcp_size: int


def read_params(raw: Mapping[str, Any], request_id: str, prompt_tokens: int) -> TransferRequest | None:
    """Return the transfer that the parameters ask for; None if they ask for none.

    Raises ``ValueError`` with one sentence if they ask for one that cannot be.
    """
    if not (raw.get("do_remote_prefill") or raw.get("do_remote_decode")):
        return None
    try:
        params = msgspec.convert(
            {name: value for name, value in raw.items() if value is not None}, TransferParams
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params cannot be read: {error}") from error
    problem = next(_problems(params, prompt_tokens), None)
    if problem:
        raise ValueError(f"kv_transfer_params cannot be used: {problem}")
    decodes = params.do_remote_prefill
    remote = _remote(params)
    mode = mode_of(decodes, remote is not None, params.metaserver or "")
    if decodes and mode == "blockwise" and remote is None:
        raise ValueError(
            "kv_transfer_params ask for do_remote_prefill but name neither a metaserver nor "
            "remote_engine_id, remote_ranks and layout_digest: pass on unchanged what the prefill engine "
            "answered"
        )
    return TransferRequest(
        key=TransferKey(params.transfer_id or uuid.uuid4().hex, params.attempt),
        mode=mode,
        request_id=request_id,
        prompt_tokens=prompt_tokens,
        remote=remote,
        metaserver=params.metaserver or "",
        cached_tokens=params.remote_cached_tokens,
    )


def _problems(params: TransferParams, prompt_tokens: int) -> Iterator[str]:
    if params.do_remote_prefill and params.do_remote_decode:
        yield "they ask for do_remote_prefill and do_remote_decode at once"
    if len(params.transfer_id) > MAX_NAME_LENGTH:
        yield f"transfer_id has {len(params.transfer_id)} characters, more than {MAX_NAME_LENGTH}"
    if not 0 <= params.attempt < 1 << 31:
        yield f"attempt is {params.attempt}"
    if params.do_remote_decode and not 0 <= params.remote_cached_tokens <= prompt_tokens:
        yield f"remote_cached_tokens is {params.remote_cached_tokens}, and the prompt has {prompt_tokens}"
    ranks = params.remote_ranks or ()
    if len(ranks) > MAX_RANKS:
        yield f"remote_ranks names {len(ranks)} ranks, more than {MAX_RANKS}"
    for rank in ranks:
        if not (0 < rank.port < 65536 and 0 < len(rank.host) <= MAX_NAME_LENGTH):
            yield f"remote_ranks names the address {rank.host[:MAX_NAME_LENGTH]!r}, port {rank.port}"


def _remote(params: TransferParams) -> RemoteEngine | None:
    if not (params.remote_engine_id and params.remote_ranks and params.layout_digest):
        return None
    return RemoteEngine(params.remote_engine_id, params.layout_digest, params.remote_ranks)
