"""What the router knows of prefill engines before it asks them: where their ranks are.

Block-wise D-first the decode engine hears of a transfer while the prompt is still being computed, so it has
to be told beforehand whose blocks it will read. An engine says where its ranks are with every prompt that
it computes; the newest word counts, since a restarted engine has other addresses. An API server may front
several data-parallel engines: each is known by its rank, and a request is pinned to the one that was named.
"""

import re

import msgspec

from .cancel import RankAddress

RANK_IN_ID = re.compile(r"_dp(\d+)$")
"""How vLLM names the engine of a data-parallel rank."""


class PrefillAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Of what a prefill engine answers, what stays true for its next prompts."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_ranks: tuple[RankAddress, ...]
    layout_digest: str

    @property
    def data_parallel_rank(self) -> str | None:
        """For the header ``X-data-parallel-rank``; None for an engine that is no data-parallel rank."""
        found = RANK_IN_ID.search(self.remote_engine_id)
        return found.group(1) if found else None


class Directories:
    """The addresses of prefill engines by the URL of their API server."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, PrefillAddress]] = {}

    def learn(self, url: str, params: msgspec.Raw) -> None:
        """Note what an engine answered; parameters of other connectors say too little and change nothing."""
        try:
            address = msgspec.json.decode(params, type=PrefillAddress)
        except msgspec.ValidationError:
            return
        engines = self._known.setdefault(url, {})
        rank = address.data_parallel_rank or ""
        before = engines.get(rank)
        if before is not None and before.layout_digest != address.layout_digest:
            # Restarted, and with it whatever else stands behind this API server.
            engines.clear()
        engines[rank] = address

    def take(self, url: str) -> PrefillAddress | None:
        """Return one of the engines behind this URL, each in its turn; None if none is known."""
        engines = self._known.get(url)
        if not engines:
            return None
        rank = next(iter(engines))
        address = engines.pop(rank)
        engines[rank] = address  # now the last in the order
        return address

    def ranks(self, url: str) -> tuple[RankAddress, ...]:
        """Return all ranks that are known behind this URL."""
        return tuple(rank for each in self._known.get(url, {}).values() for rank in each.remote_ranks)

    def forget(self, url: str) -> None:
        """What was known may be wrong: the next prompt is computed first, and tells."""
        self._known.pop(url, None)
