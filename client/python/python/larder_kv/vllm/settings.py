"""The users' settings of the connector (`kv_connector_extra_config`) and of the tier."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from larder_kv.settings import ADDRESS, HOUR, NodeSettings, setting
from larder_kv.settings import UnsupportedError as UnsupportedError

MOST_PREFETCHES, MOST_HANDOFFS = 64, 96
"""A session has 56 requests under way at a time (see `MAX_OUTSTANDING_REQUESTS` of the protocol); others wait for one of them, for
the timeout at most. A prefetch takes half of the timeout at most, a question of a hand-over a quarter: so many get their turn."""


@dataclass(frozen=True)
class Settings(NodeSettings):
    """The connector's settings."""

    device: int | None = setting(
        "the number of the node's actor that the engine talks to, for nodes with several GPUs; by default the actor with the "
        "fewest sessions; all ranks of an engine use the same actor; other engines reach its chunks through theirs",
        default=None,
        least=0,
        most=65_535,
    )
    timeout_seconds: float = setting("how long a request to the node may take", default=10.0, above=0, most=HOUR)
    chunk_tokens: int | None = setting(
        "tokens of one chunk, a whole number of engine blocks; by default the largest up to 256",
        default=None,
        least=1,
        most=65_536,
    )
    load: Literal["async", "sync"] = setting(
        '`"async"`: hits are loaded between steps, while other requests compute; `"sync"`: layer by layer ahead of the step '
        "that needs them, for engines of one rank and models whose layers are alike",
        default="async",
    )
    save: bool = setting("whether the engine's computed KV is saved", default=True)
    events: str | None = setting(
        "the node's HTTP address: vLLM's publisher then publishes the node's chunks too, see below",
        default=None,
        form=ADDRESS,
    )
    events_tokens: Literal["off", "local", "encrypted"] = setting(
        "whether these events have the tokens of the chunks that this engine knows, as routers need them; `local`: vLLM's publisher "
        "must be on loopback or a Unix socket; `encrypted`: you confirm that the way to its subscribers is encrypted",
        default="off",
    )
    describe: bool = setting(
        "whether the engine tells the node the tokens of chunks: a node with `[kv_events] tokens` then publishes them itself, see below",
        default=False,
    )
    events_again_seconds: float | None = setting(
        "how often all held chunks are published again, for subscribers that came later",
        default=None,
        least=1,
        most=86_400,
    )
    prefetch_seconds: float = setting(
        "how long a request waits for chunks from disk and other nodes, at most half of `timeout_seconds`; then it takes those that "
        "have come",
        default=1.0,
        least=0,
        most=HOUR,
    )
    prefill_tokens_per_second: float | None = setting(
        "how fast this engine computes prompts: then the node loads only chunks that come sooner than they are computed, and "
        "counts the seconds that hits save",
        default=None,
        above=0,
        most=1_000_000_000,
    )
    prefetches: int = setting(
        "requests for which prefixes are brought at the same time", default=16, least=1, most=MOST_PREFETCHES
    )
    save_queue_chunks: int = setting(
        "chunks that may wait for their save; further chunks are dropped and counted", default=256, least=1, most=1_000_000
    )
    hints: bool = setting("whether hints of requests are followed, as below", default=True)
    handoffs: int = setting(
        "requests that may wait at the same time for another engine to compute their prompts",
        default=64,
        least=1,
        most=MOST_HANDOFFS,
    )
    handoff_seconds: float = setting(
        "how long the other engine may hand nothing over; then this engine computes the prompt", default=10.0, above=0, most=HOUR
    )

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str = "kv_connector_extra_config") -> Self:
        """Reads `kv_connector_extra_config`."""
        return super().parse(given, where)

    def check_events(self, endpoints: Sequence[str] | None) -> None:
        """Raises `UnsupportedError` if events would reach nobody, or if tokens could reach other hosts. `endpoints` are those of
        vLLM's publisher; None if it publishes nothing."""
        if self.events is None:
            if self.events_tokens != "off" or self.events_again_seconds is not None:
                raise UnsupportedError("`events_tokens` and `events_again_seconds` need `events`, the node's HTTP address")
            return
        if endpoints is None:
            raise UnsupportedError("`events` is set, but vLLM publishes nothing: set its --kv-events-config, or leave `events` out")
        public = [endpoint for endpoint in endpoints if not LOCAL.match(endpoint)]
        if self.events_tokens == "local" and public:
            raise UnsupportedError(
                f"`events_tokens` publishes the tokens of prompts, and vLLM's publisher is at {public[0]}: give --kv-events-config an "
                'endpoint on loopback (tcp://127.0.0.1:PORT) or a Unix socket (ipc://PATH), or set `events_tokens` to "encrypted" if '
                "the way to its subscribers is encrypted"
            )

    def chunk_for(self, block_tokens: int) -> int:
        """Tokens of one chunk, for engine blocks of `block_tokens` tokens."""
        chunk = self.chunk_tokens or max(256 // block_tokens, 1) * block_tokens
        if chunk % block_tokens != 0:
            raise UnsupportedError(f"chunk_tokens is {chunk}: it must be a multiple of the block size, {block_tokens}")
        return chunk


LOCAL = re.compile(r"ipc://|inproc://|tcp://(127(\.\d+){3}|localhost|\[::1\]):")
"""Endpoints of ZeroMQ that only this host reaches."""


@dataclass(frozen=True)
class TierSettings(NodeSettings):
    """The settings that users choose: the tier's entry in vLLM's configuration."""

    timeout_seconds: float = setting("how long a request to the node may take", default=10.0, above=0, most=HOUR)
    threads: int = setting("loads and stores that are under way at the same time", default=4, least=1, most=256)
    locality: Literal["LOCAL", "REMOTE"] | None = setting(
        '`"LOCAL"`: the tier finds only blocks in this host\'s memory or on its disk; `"REMOTE"`, and by default: also blocks of other '
        "nodes and of the object store; vLLM's events and the `kv_load_tiers` of requests name the tier by this value",
        default=None,
    )
