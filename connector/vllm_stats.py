"""What was counted, on the engine's own ``/metrics`` and in vLLM's log line, by vLLM's hooks for it.

vLLM adds up what the ranks of an engine say and carries it to the process that serves ``/metrics``.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from .stats import COUNTERS, Observed

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass
class TransferStats(KVConnectorStats):
    """``Observed`` in the form in which vLLM carries it."""

    @classmethod
    def of(cls, observed: Observed) -> "TransferStats":
        """Return it to be carried."""
        return cls(data=msgspec.to_builtins(observed))

    @property
    def observed(self) -> Observed:
        """Return it typed."""
        return msgspec.convert(self.data, Observed)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "TransferStats":
        """Add what another rank, or a later step, has observed."""
        total = self.observed
        total.add(msgspec.convert(other.data, Observed))
        self.data = msgspec.to_builtins(total)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line."""
        observed = self.observed
        numbers: dict[str, int | float] = {}
        for name, labelled in observed.counts.items():
            for labels, count in labelled.items():
                numbers[f"{name} {labels}"] = count
        for mode, seconds in observed.copy_seconds.items():
            numbers[f"copies {mode}"] = len(seconds)
            numbers[f"mean copy seconds {mode}"] = round(sum(seconds) / len(seconds), 4)
        if observed.leases:
            numbers["leases"] = sum(observed.leases.values())
        return numbers

    def is_empty(self) -> bool:
        """Return whether there is nothing to say."""
        return self.observed.empty


class TransferMetrics(KVConnectorPromMetrics):
    """The metrics in the process that serves them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=spec.name, documentation=spec.about, labelnames=[*labelnames, *spec.labels]
            )
            for name, spec in COUNTERS.items()
        }
        self._copy_seconds = self._histogram_cls(
            name="dfirst_copy_seconds",
            documentation="Time that the copies of one leg (a prefill and a decode rank) took",
            buckets=SECONDS,
            labelnames=[*labelnames, "mode"],
        )
        self._leases = self._gauge_cls(
            name="dfirst_leases",
            documentation="Leases that run now: peers that may read or write blocks of this engine",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        self._lent: dict[int, dict[str, int]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine has said."""
        observed = msgspec.convert(transfer_stats_data, Observed)
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labelled in observed.counts.items():
            for labels, count in labelled.items():
                self._counters[name].labels(*engine, *labels.split("/")).inc(count)
        for mode, seconds in observed.copy_seconds.items():
            for each in seconds:
                self._copy_seconds.labels(*engine, mode).observe(each)
        if observed.leases:
            lent = self._lent.setdefault(engine_idx, {})
            lent.update(observed.leases)
            self._leases.labels(*engine).set(sum(lent.values()))
