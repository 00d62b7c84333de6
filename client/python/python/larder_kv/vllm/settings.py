"""What users choose: `kv_connector_extra_config`, parsed once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from larder_kv.settings import UnsupportedError as UnsupportedError
from larder_kv.settings import check_verify


@dataclass(frozen=True)
class Settings:
    """The connector's settings. A key that is none of them is an error."""

    socket: str
    """The tenant's socket of the node on this host."""
    device: int = 0
    """Which of the node's actors the engine talks to, by number: one for each GPU of its configuration. All ranks of an engine
    use the same, since a chunk is whole in one of them; other engines get it from there."""
    chunk_tokens: int | None = None
    """Tokens of one chunk: a whole number of engine blocks. The largest one up to 256 tokens where not given."""
    load: str = "async"
    """How hits are loaded: "async" (between steps, while others compute) or "sync" (layer by layer ahead of the step that
    needs them; for engines of one rank)."""
    save: bool = True
    """Whether what this engine computes is saved."""
    events: str | None = None
    """The node's HTTP address, HOST:PORT: vLLM's own publisher then tells what the node gains and loses too."""
    prefetch_seconds: float = 1.0
    """How long a request waits for what was found of it on disk and other nodes; then it takes what has come."""
    prefill_tokens_per_second: float | None = None
    """How fast this engine computes prompts: then only what comes sooner than it is computed is loaded, and the node counts
    the seconds that hits save."""
    prefetches: int = 16
    """Requests whose prefixes are brought at the same time; others wait for their turn."""
    save_queue_chunks: int = 256
    """Chunks that wait to be saved at the same time; beyond it saves are shed and counted."""
    window_bytes: int = 64 << 20
    """Write window that each rank asks of the node."""
    handoffs: int = 64
    """Requests that wait at the same time for their prompts to be computed by another engine."""
    handoff_seconds: float = 10.0
    """For how long such an engine may hand nothing over: then the prompt is computed here."""
    timeout_seconds: float = 10.0
    """How long a request to the node may take."""
    reconnect_seconds: float = 1.0
    """How often a node that is not there is tried again."""
    verify: str = "sample"
    """Which blocks are verified as they are loaded: "off", "sample" (one in 64) or "always". One that is wrong is computed, and the
    node drops its chunk."""
    model_revision: str = ""
    """Says which weights the model has where neither vLLM nor the files do; part of every key."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Reads `kv_connector_extra_config`."""
        known = {field.name for field in fields(cls)}
        for key in extra:
            if key not in known:
                raise UnsupportedError(f"kv_connector_extra_config has `{key}`, which is none of {sorted(known)}")
        if "socket" not in extra:
            raise UnsupportedError("kv_connector_extra_config needs `socket`: the path of the node's socket")
        settings = cls(**extra)
        if settings.load not in ("async", "sync"):
            raise UnsupportedError(f'`load` is "async" or "sync", not {settings.load!r}')
        for name in ("prefetches", "save_queue_chunks", "handoffs"):
            if getattr(settings, name) < 1:
                raise UnsupportedError(f"`{name}` must be at least 1")
        speed = settings.prefill_tokens_per_second
        if speed is not None and not speed > 0:
            raise UnsupportedError(f"`prefill_tokens_per_second` is a speed or not given, not {speed}")
        check_verify(settings.verify)
        if settings.device < 0:
            raise UnsupportedError(f"`device` is the number of one of the node's actors, not {settings.device}")
        return settings

    def chunk_for(self, block_tokens: int) -> int:
        """Tokens of one chunk, for engine blocks of `block_tokens` tokens."""
        chunk = self.chunk_tokens or max(256 // block_tokens, 1) * block_tokens
        if chunk < 1 or chunk % block_tokens != 0:
            raise UnsupportedError(f"chunk_tokens is {chunk}: it must be a multiple of the block size, {block_tokens}")
        return chunk
