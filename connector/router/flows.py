"""How one transfer goes through its two engines, in either mode, and how its end is told to them.

Block-wise: the prefill engine answers, then the decode engine is asked with what it answered. Layer-wise:
the decode engine is asked at once; when it posts to the metaserver, the prompt goes to a prefill engine
beside it. Block-wise D-first: both are asked at once, once it is known where the prefill engine's ranks are.
A transfer that ends early is cancelled at every rank known by then.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import httpx
import msgspec

from .background import Background
from .body import engine_body, prefill_body
from .cancel import RankAddress, TransferCanceller
from .directories import Directories, PrefillAddress
from .engines import Engine, EnginePool
from .errors import EngineError, RouterError
from .metrics import RouterMetrics
from .settings import Mode, RouterSettings
from .throttle import Throttle
from .transfers import Transfer, TransferRegister
from .upstream import EngineCall, EngineLink
from .wire import DecodeAsk, MetaserverPost, PrefillAnswer, PrefillAsk, PrefillGrant, PullAsk

logger = logging.getLogger(__name__)

DATA_PARALLEL_RANK_HEADER = "X-data-parallel-rank"


class Flows:
    def __init__(
        self,
        settings: RouterSettings,
        link: EngineLink,
        canceller: TransferCanceller,
        metrics: RouterMetrics,
        metaserver: str,
    ) -> None:
        self.prefill = EnginePool("prefill", settings.prefill, settings.retry_engine_after_seconds)
        self.decode = EnginePool("decode", settings.decode, settings.retry_engine_after_seconds)
        self.register = TransferRegister()
        self.background = Background()
        self._directories = Directories()
        self._settings = settings
        self._link = link
        self._canceller = canceller
        self._metrics = metrics
        self._metaserver = metaserver
        self._no_grant_log = Throttle(settings.repeat_log_seconds)

    @asynccontextmanager
    async def run(self, transfer: Transfer, why_stopped: Callable[[], str]) -> AsyncIterator[httpx.Response]:
        """The decode engine's answer, to be read inside; leaving it ends the transfer.

        ``why_stopped`` gives the reason if the work is cancelled from outside.
        """
        self.register.add(transfer)
        try:
            async with self._answer(transfer) as response:
                yield response
        except RouterError as error:
            self._give_up(transfer, error.reason)
            raise
        except BaseException:
            self._give_up(transfer, why_stopped())
            raise
        else:
            if transfer.failure is not None:
                self._give_up(transfer, transfer.failure)
            elif transfer.prefill_task is not None:
                # The decode engine has all that it needs; a prefill still open has as a rule just ended.
                late = transfer.prefill_task
                asyncio.get_running_loop().call_later(self._settings.prefill_grace_seconds, late.cancel)
        finally:
            self.register.end(transfer)

    def _answer(self, transfer: Transfer) -> AbstractAsyncContextManager[httpx.Response]:
        if transfer.mode is Mode.BLOCKWISE:
            return self._blockwise(transfer)
        if transfer.mode is Mode.BLOCKWISE_D_FIRST:
            return self._blockwise_d_first(transfer)
        if transfer.mode is Mode.LAYERWISE:
            return self._layerwise(transfer)
        return self._link.open(self.decode, call_for(transfer, lambda _: engine_body(transfer.body, None)))

    @asynccontextmanager
    async def _blockwise(self, transfer: Transfer) -> AsyncIterator[httpx.Response]:
        grant = await self._prefill_first(transfer)
        # The same parameters at every try: the attempt is the prefill engine's, and no other
        # decode engine has used it yet.
        body = engine_body(transfer.body, grant)
        async with self._link.open(self.decode, call_for(transfer, lambda _: body)) as response:
            yield response

    async def _prefill_first(self, transfer: Transfer) -> msgspec.Raw | None:
        def content(tries: int) -> bytes:
            transfer.attempt = tries
            return prefill_body(transfer.body, PrefillAsk(transfer_id=transfer.transfer_id, attempt=tries))

        return self._read_grant(transfer, *await self._ask_prefill(transfer, content))

    def _read_grant(self, transfer: Transfer, url: str, answer: bytes) -> msgspec.Raw | None:
        """The parameters by which the prefill engine at ``url`` lets its blocks be pulled; None without."""
        try:
            raw = msgspec.json.decode(answer, type=PrefillAnswer).kv_transfer_params
            grant = msgspec.json.decode(raw, type=PrefillGrant | None)
        except msgspec.DecodeError as error:
            what = "the prefill engine's answer does not decode: check that its connector matches the router"
            raise EngineError(502, what, transfer.transfer_id, detail=str(error)) from error
        if grant is None or not grant.do_remote_prefill:
            self._note_no_grant(transfer)
            return None
        transfer.prefill_ranks = tuple(grant.remote_ranks)
        if grant.transfer_id not in (None, transfer.transfer_id):
            what = "the prefill engine answered for another transfer"
            raise EngineError(502, what, transfer.transfer_id)
        self._directories.learn(url, raw)
        return raw

    @asynccontextmanager
    async def _blockwise_d_first(self, transfer: Transfer) -> AsyncIterator[httpx.Response]:
        """Both engines at once, where it is known where the prefill engine's ranks are; else P-first."""
        engine = self.prefill.pick(())
        address = self._directories.take(engine.url) if engine is not None else None
        if engine is None or address is None:
            async with self._blockwise(transfer) as response:
                yield response
            return
        transfer.prefill_ranks = address.remote_ranks
        transfer.prefill_task = self.background.spawn(
            self._prefill_early(transfer, engine, address), f"prefill of transfer {transfer.transfer_id}"
        )
        ask = PullAsk(
            transfer_id=transfer.transfer_id,
            attempt=transfer.attempt,
            remote_engine_id=address.remote_engine_id,
            remote_host=address.remote_host,
            remote_port=address.remote_port,
            remote_ranks=address.remote_ranks,
            layout_digest=address.layout_digest,
        )
        body = engine_body(transfer.body, ask)
        async with self._link.open(self.decode, call_for(transfer, lambda _: body)) as response:
            yield response

    async def _prefill_early(self, transfer: Transfer, engine: Engine, address: PrefillAddress) -> None:
        """Compute the prompt beside the decode engine, which waits for it; tell the ranks if it fails."""
        ask = PrefillAsk(transfer_id=transfer.transfer_id, attempt=transfer.attempt)
        body = prefill_body(transfer.body, ask)
        reason = "the prefill engine holds no blocks for the transfer"
        granted = None
        try:
            rank = address.data_parallel_rank
            pinned = {} if rank is None else {DATA_PARALLEL_RANK_HEADER: rank}
            url, answer = await self._ask_prefill(transfer, lambda _: body, self.prefill.only(engine), pinned)
            granted = self._read_grant(transfer, url, answer)
        except RouterError as error:
            logger.warning("transfer %s: prefill failed: %s", transfer.transfer_id, error.reason)
            reason = error.reason
        finally:
            same = transfer.prefill_ranks == address.remote_ranks
            if not same:
                reason = "the prefill engine was restarted since the decode engine was told of it"
            if granted is None or not same:
                self._directories.forget(engine.url)
                if not transfer.ended:
                    for ranks in {address.remote_ranks, transfer.prefill_ranks}:
                        self._cancel(ranks, transfer, transfer.attempt, reason)

    def _note_no_grant(self, transfer: Transfer) -> None:
        self._metrics.without_transfer.inc()
        if (since_last := self._no_grant_log.count()) is not None:
            logger.warning(
                "transfer %s: the prefill engine named no blocks to pull, the decode engine computes all; "
                "check the prefill engine's kv_transfer_config (%d more since the last such line)",
                transfer.transfer_id,
                since_last,
            )

    @asynccontextmanager
    async def _layerwise(self, transfer: Transfer) -> AsyncIterator[httpx.Response]:
        def content(tries: int) -> bytes:
            if transfer.prefill_task is not None:
                self._give_up(transfer, "the decode engine's connection broke, its request is sent again")
            # From here on a post of an earlier attempt finds nothing.
            transfer.attempt = tries
            ask = DecodeAsk(transfer_id=transfer.transfer_id, attempt=tries, metaserver=self._metaserver)
            return engine_body(transfer.body, ask)

        async with self._link.open(self.decode, call_for(transfer, content)) as response:
            yield response

    def take_post(self, post: MetaserverPost, raw: bytes) -> int:
        """The status for a decode engine that has made room; the prefill then starts in the background."""
        transfer = self.register.find(post.transfer_id, post.attempt)
        if transfer is None or transfer.mode is not Mode.LAYERWISE:
            return 404
        if transfer.posted_attempt == post.attempt:
            return 202
        if transfer.answered:
            # Who has seen the answer knows the id: taking a post now would let a client name the
            # addresses that a prefill engine writes to.
            return 404
        transfer.posted_attempt = post.attempt
        transfer.decode_ranks = tuple(post.remote_ranks)
        transfer.prefill_task = self.background.spawn(
            self._prefill_beside(transfer, post, msgspec.Raw(raw)), f"prefill of transfer {post.transfer_id}"
        )
        return 202

    async def _prefill_beside(self, transfer: Transfer, post: MetaserverPost, params: msgspec.Raw) -> None:
        body = prefill_body(transfer.body, params)
        try:
            await self._ask_prefill(transfer, lambda _: body)
        except RouterError as error:
            logger.warning("transfer %s: prefill failed: %s", transfer.transfer_id, error.reason)
            self._prefill_failed(transfer, post, error.reason)
        except Exception:
            self._prefill_failed(transfer, post, "the router failed to ask a prefill engine")
            raise

    def _prefill_failed(self, transfer: Transfer, post: MetaserverPost, reason: str) -> None:
        if not transfer.ended:
            self._cancel(post.remote_ranks, transfer, post.attempt, reason)

    async def _ask_prefill(
        self,
        transfer: Transfer,
        content: Callable[[int], bytes],
        pool: EnginePool | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[str, bytes]:
        """The URL of the engine that answered, and its answer."""
        seconds = self._settings.prefill_timeout_seconds
        call = call_for(transfer, content, headers)
        try:
            with anyio.fail_after(seconds):
                async with self._link.open(pool or self.prefill, call) as response:
                    return call.engine_url, await response.aread()
        except RouterError:
            raise  # it refused, or is away: it holds nothing for this transfer
        except BaseException as error:
            if transfer.mode is Mode.BLOCKWISE:
                # The answer, which says where the blocks are held, is lost; they may be held all the same.
                transfer.prefill_ranks = self._directories.ranks(call.engine_url)
            if not isinstance(error, TimeoutError):
                raise
            what = f"the prefill engine did not answer within {seconds:g} seconds"
            raise EngineError(504, what, transfer.transfer_id) from error

    def _give_up(self, transfer: Transfer, reason: str) -> None:
        logger.info("transfer %s given up: %s", transfer.transfer_id, reason)
        if transfer.prefill_task is not None:
            transfer.prefill_task.cancel()
            transfer.prefill_task = None
        self._cancel(transfer.prefill_ranks, transfer, transfer.attempt, reason)
        if transfer.posted_attempt is not None:
            self._cancel(transfer.decode_ranks, transfer, transfer.posted_attempt, reason)

    def _cancel(self, ranks: Sequence[RankAddress], transfer: Transfer, attempt: int, reason: str) -> None:
        """Beside the request: neither the client nor the other engine waits for it."""
        if not ranks or transfer.mode is None:
            return
        transfer_id, mode = transfer.transfer_id, transfer.mode.on_the_wire

        async def tell() -> None:
            with anyio.fail_after(self._settings.cancel_timeout_seconds):
                await self._canceller.cancel(tuple(ranks), transfer_id, attempt, mode, reason)

        self._metrics.cancels.inc()
        self.background.spawn(tell(), f"cancelling transfer {transfer_id}")


def call_for(
    transfer: Transfer, content: Callable[[int], bytes], headers: Mapping[str, str] | None = None
) -> EngineCall:
    return EngineCall(
        method="POST",
        path=transfer.path,
        headers={**transfer.headers, **(headers or {})},
        transfer_id=transfer.transfer_id,
        content=content,
    )
