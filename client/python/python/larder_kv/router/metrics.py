"""The router's figures for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_BYTE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One router's."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "larder_router_requests",
            "Requests, by how they ended: answered, refused (by the router), unanswered (by no engine), cut (in the middle of an "
            "answer), left (by the client).",
            ["outcome"],
            registry=registry,
        )
        self.tries = Counter(
            "larder_router_tries",
            "Requests sent to an engine, by outcome: ok, busy (429, 502, 503, 504), error (500), unreachable.",
            ["engine", "outcome"],
            registry=registry,
        )
        self.routed = Counter(
            "larder_router_routed", "Generating requests, by what they were routed by.", ["by"], registry=registry
        )
        self.prompt_tokens = Counter(
            "larder_router_prompt_tokens", "Tokens of prompts that were routed by cache.", registry=registry
        )
        self.cached_tokens = Counter(
            "larder_router_cached_tokens", "Such tokens that the cluster held.", registry=registry
        )
        self.handed_over = Counter(
            "larder_router_handed_over",
            "Prompts for engines of decode: prefilled elsewhere, short (of little to compute), or alone (no prefill did it).",
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
        self.open = Gauge("larder_router_open_requests", "Requests that an engine has.", ["engine"], registry=registry)
        self.backlog = Gauge(
            "larder_router_backlog_tokens", "Cost of these in tokens of prefill.", ["engine"], registry=registry
        )

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
