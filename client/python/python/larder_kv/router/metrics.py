"""The router's metrics for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_BYTE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The metrics of one router."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "larder_router_requests",
            "Requests, by their end: answered, refused (by the router), unanswered (no engine answered), cut (in the middle of "
            "an answer), left (by the client).",
            ["outcome"],
            registry=registry,
        )
        self.tries = Counter(
            "larder_router_tries",
            "Requests sent to an engine, by outcome: ok, busy (429, 502, 503, 504), error (500), silent, unreachable.",
            ["engine", "outcome"],
            registry=registry,
        )
        self.routed = Counter(
            "larder_router_routed", "Requests that generate, by what routed them: cache or load.", ["by"], registry=registry
        )
        self.prompt_tokens = Counter(
            "larder_router_prompt_tokens", "Tokens of prompts that were routed by cache.", registry=registry
        )
        self.cached_tokens = Counter(
            "larder_router_cached_tokens", "Tokens of these prompts that the cluster held.", registry=registry
        )
        self.handed_over = Counter(
            "larder_router_handed_over",
            "Prompts for decode engines: prefilled elsewhere, short (little to compute), or alone (no prefill engine computed "
            "the prompt).",
            ["how"],
            registry=registry,
        )
        self.coordinator_failures = Counter(
            "larder_router_coordinator_failures", "Questions that no coordinator answered in time.", registry=registry
        )
        self.first_byte = Histogram(
            "larder_router_first_byte_seconds",
            "Time until an answer's first byte.",
            buckets=FIRST_BYTE_SECONDS,
            registry=registry,
        )
        self.up = Gauge(
            "larder_router_engine_up", "Whether an engine is well.", ["engine", "role", "node"], registry=registry
        )
        self.open = Gauge(
            "larder_router_open_requests", "Requests that an engine has not finished.", ["engine"], registry=registry
        )
        self.backlog = Gauge(
            "larder_router_backlog_tokens",
            "Cost of an engine's open requests, in tokens of prefill.",
            ["engine"],
            registry=registry,
        )

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
