"""The users' settings: `kv_connector_extra_config`, parsed once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from larder_kv.settings import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Verify, read_settings
from larder_kv.settings import UnsupportedError as UnsupportedError


@dataclass(frozen=True)
class Settings:
    """The connector's settings."""

    socket: str
    """The tenant's socket of the node on this host."""
    device: int = field(default=0, metadata=AT_LEAST_0)
    """Which of the node's actors the engine talks to, by number: one for each GPU of its configuration. All ranks of an engine
    use the same, since a chunk is whole in one of them; other engines get it from there."""
    chunk_tokens: int | None = field(default=None, metadata=AT_LEAST_1)
    """Tokens of one chunk: a whole number of engine blocks. The largest one up to 256 tokens where not given."""
    load: Literal["async", "sync"] = "async"
    """How hits are loaded: "async" (between steps, while others compute) or "sync" (layer by layer ahead of the step that
    needs them; for engines of one rank)."""
    save: bool = True
    """Whether what this engine computes is saved."""
    events: str | None = None
    """The node's HTTP address, HOST:PORT: vLLM's own publisher then tells what the node gains and loses too."""
    prefetch_seconds: float = field(default=1.0, metadata=AT_LEAST_0)
    """How long a request waits for what was found of it on disk and other nodes; then it takes what has come."""
    prefill_tokens_per_second: float | None = field(default=None, metadata=ABOVE_0)
    """How fast this engine computes prompts: then only what comes sooner than it is computed is loaded, and the node counts
    the seconds that hits save."""
    prefetches: int = field(default=16, metadata=AT_LEAST_1)
    """Requests whose prefixes are brought at the same time; others wait for their turn."""
    save_queue_chunks: int = field(default=256, metadata=AT_LEAST_1)
    """Chunks that wait to be saved at the same time; beyond it saves are shed and counted."""
    window_bytes: int = field(default=64 << 20, metadata=AT_LEAST_1)
    """Write window that each rank asks of the node."""
    handoffs: int = field(default=64, metadata=AT_LEAST_1)
    """Requests that wait at the same time for their prompts to be computed by another engine."""
    handoff_seconds: float = field(default=10.0, metadata=ABOVE_0)
    """For how long such an engine may hand nothing over: then the prompt is computed here."""
    timeout_seconds: float = field(default=10.0, metadata=ABOVE_0)
    """How long a request to the node may take."""
    reconnect_seconds: float = field(default=1.0, metadata=ABOVE_0)
    """How often a node that is not there is tried again."""
    verify: Verify = "sample"
    """Which blocks are verified as they are loaded: "off", "sample" (one in 64) or "always". One that is wrong is computed, and the
    node drops its chunk."""
    model_revision: str = ""
    """Says which weights the model has where neither vLLM nor the files do; part of every key."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Reads `kv_connector_extra_config`."""
        settings = read_settings(cls, extra, "kv_connector_extra_config")
        events = settings.events
        if events is not None and not ADDRESS.fullmatch(events):
            raise UnsupportedError(
                f"`events` in kv_connector_extra_config is HOST:PORT, the node's HTTP address, not {events!r}"
            )
        return settings

    def chunk_for(self, block_tokens: int) -> int:
        """Tokens of one chunk, for engine blocks of `block_tokens` tokens."""
        chunk = self.chunk_tokens or max(256 // block_tokens, 1) * block_tokens
        if chunk < 1 or chunk % block_tokens != 0:
            raise UnsupportedError(f"chunk_tokens is {chunk}: it must be a multiple of the block size, {block_tokens}")
        return chunk


ADDRESS = re.compile(r"([^\s:/@]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
"""HOST:PORT, where HOST may be an IPv6 address in brackets."""
