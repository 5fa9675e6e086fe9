"""From the engines' answers to the client's: one passed on as it is, or several merged as they come.

The pieces of a split request run side by side, each in a task of its own, and hand what they get to the one
that writes. A piece that fails ends all of them.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx
import msgspec
from anyio.streams.memory import MemoryObjectSendStream

from .body import Work
from .errors import EngineError, RouterError, StreamedError
from .flows import Flows
from .merge import ChunkMerger, merge_answers
from .reply import Reply
from .sse import (
    BOUNDARY,
    DONE,
    DONE_PAYLOAD,
    error_with_transfer,
    event_blocks,
    holds_error,
    is_stream,
    payloads,
    with_transfer,
)
from .transfers import Transfer

logger = logging.getLogger(__name__)

CHUNKS_WAITING = 64
"""Chunks of all pieces that may wait for a slow client before the engines' streams are left to stand."""


class Part(msgspec.Struct):
    """What a piece hands over: a chunk or an answer, or the error that ended it."""

    number: int
    message: dict[str, Any] | None = None
    error: RouterError | None = None


class Relay:
    """The answer to one client request."""

    def __init__(self, flows: Flows, work: Work, transfers: list[Transfer], merged_id: str) -> None:
        self._flows = flows
        self._work = work
        self._transfers = transfers
        self._merged_id = merged_id

    async def write(self, reply: Reply, why_stopped: Callable[[], str]) -> None:
        if not self._work.split:
            transfer = self._transfers[0]
            async with self._flows.run(transfer, why_stopped) as response:
                await self._pass_on(transfer, response, reply)
        elif self._work.pieces[0].body.get("stream"):
            await self._write_merged_stream(reply, why_stopped)
        else:
            await self._write_merged_answer(reply, why_stopped)

    async def _pass_on(self, transfer: Transfer, response: httpx.Response, reply: Reply) -> None:
        if not is_stream(response):
            content = await response.aread()
            self._reveal(reply)
            content_type = response.headers.get("content-type", "application/json")
            await reply.whole(response.status_code, content, content_type)
            return
        done = False
        async for block in event_blocks(response):
            if not reply.started:
                self._reveal(reply)
                await reply.begin_stream()
            if holds_error(block):
                block = with_transfer(block, transfer.transfer_id)
                reply.outcome = "error"
                transfer.failure = "the decode engine reported an error in its stream"
            done = done or block.endswith(DONE)
            await reply.chunk(block)
        if not done:
            raise cut_short(transfer)
        await reply.end_stream()

    def _reveal(self, reply: Reply) -> None:
        """Name the transfers to the client; not in a merged stream, which begins before all have answers."""
        for transfer in self._transfers:
            transfer.answered = True
        reply.transfers = [transfer.transfer_id for transfer in self._transfers]

    async def _write_merged_answer(self, reply: Reply, why_stopped: Callable[[], str]) -> None:
        answers: dict[int, dict[str, Any]] = {}

        async def keep(part: Part) -> None:
            assert part.message is not None
            answers[part.number] = part.message

        await self._gather(keep, why_stopped)
        self._reveal(reply)
        ordered = [answers[number] for number in range(len(self._transfers))]
        try:
            merged = merge_answers(self._work.pieces, ordered, self._merged_id)
        except msgspec.ValidationError as error:
            raise unreadable(self._transfers[0], error) from error
        await reply.json(merged)

    async def _write_merged_stream(self, reply: Reply, why_stopped: Callable[[], str]) -> None:
        merger = ChunkMerger(self._merged_id)

        async def pass_on(part: Part) -> None:
            assert part.message is not None
            try:
                chunk = merger.take(self._work.pieces[part.number], part.message)
            except msgspec.ValidationError as error:
                raise unreadable(self._transfers[part.number], error) from error
            # Before the first chunk an error can still be an answer with its own status.
            if not reply.started:
                await reply.begin_stream()
            if chunk is not None:
                await reply.chunk(as_event(chunk))

        await self._gather(pass_on, why_stopped)
        if not reply.started:
            await reply.begin_stream()
        if (closing := merger.closing_chunk()) is not None:
            await reply.chunk(as_event(closing))
        await reply.chunk(DONE)
        await reply.end_stream()

    async def _gather(self, take: Callable[[Part], Awaitable[None]], why_stopped: Callable[[], str]) -> None:
        """Run all pieces and give each part to ``take`` as it comes; the first error ends them all."""
        failure: RouterError | None = None

        def why() -> str:
            return why_stopped() if failure is None else "another part of the same request failed"

        giving, taking = anyio.create_memory_object_stream[Part](CHUNKS_WAITING)
        async with anyio.create_task_group() as group:
            for number in range(len(self._transfers)):
                group.start_soon(self._run_piece, number, giving.clone(), why)
            giving.close()
            async with taking:
                async for part in taking:
                    try:
                        if part.error is not None:
                            raise part.error
                        await take(part)
                    except RouterError as error:
                        failure = error
                        group.cancel_scope.cancel()
                        break
        if failure is not None:
            raise failure

    async def _run_piece(
        self, number: int, giving: MemoryObjectSendStream[Part], why_stopped: Callable[[], str]
    ) -> None:
        transfer = self._transfers[number]
        async with giving:
            try:
                async with self._flows.run(transfer, why_stopped) as response:
                    await read_piece(transfer, number, response, giving)
            except RouterError as error:
                await giving.send(Part(number, error=error))
            except Exception:
                logger.exception("transfer %s: the router failed", transfer.transfer_id)
                what = f"the router failed (transfer {transfer.transfer_id}): see its log"
                await giving.send(Part(number, error=RouterError(500, "internal_error", what)))


async def read_piece(
    transfer: Transfer, number: int, response: httpx.Response, giving: MemoryObjectSendStream[Part]
) -> None:
    if not is_stream(response):
        await giving.send(Part(number, read_message(transfer, await response.aread())))
        return
    done = False
    async for block in event_blocks(response):
        for payload in payloads(block):
            if payload == DONE_PAYLOAD:
                done = True
                continue
            message = read_message(transfer, payload)
            if "error" in message:
                raise StreamedError(error_with_transfer(payload, transfer.transfer_id))
            await giving.send(Part(number, message))
    if not done:
        raise cut_short(transfer)


def read_message(transfer: Transfer, content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise unreadable(transfer, error) from error


def as_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + BOUNDARY


def cut_short(transfer: Transfer) -> EngineError:
    return EngineError(502, "the decode engine ended its stream early", transfer.transfer_id)


def unreadable(transfer: Transfer, error: Exception) -> EngineError:
    what = "the decode engine's answer does not decode"
    return EngineError(502, what, transfer.transfer_id, detail=str(error))
