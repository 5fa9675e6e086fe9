"""What the router counts, in its own registry, so that two routers in one process keep apart."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engines import EnginePool

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "dfirst_router_requests",
            "Client requests that ended, by mode and outcome (ok, error, hang_up)",
            ["mode", "outcome"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "dfirst_router_request_seconds",
            "From a request's first byte to its answer's last",
            ["mode"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.engine_failures = Counter(
            "dfirst_router_engine_failures",
            "Requests that an engine failed, by role, engine and kind (connect, stale, broken, status)",
            ["role", "engine", "kind"],
            registry=self.registry,
        )
        self.cancels = Counter(
            "dfirst_router_transfers_cancelled", "Transfers given up before their end", registry=self.registry
        )
        self.without_transfer = Counter(
            "dfirst_router_prefills_without_transfer",
            "Prefills whose answer named no blocks to pull, so that the decode engine computed the prompt",
            registry=self.registry,
        )
        self.posts = Counter(
            "dfirst_router_metaserver_posts",
            "Posts to the metaserver, by the status of the answer",
            ["status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "dfirst_router_engine_in_flight",
            "Requests under way at an engine",
            ["role", "engine"],
            registry=self.registry,
        )

    def watch(self, pool: EnginePool) -> None:
        """Read the pool's counts whenever the metrics are asked for."""
        for engine in pool.engines:
            self.in_flight.labels(pool.role, engine.url).set_function(partial(getattr, engine, "in_flight"))

    def text(self) -> bytes:
        return generate_latest(self.registry)
