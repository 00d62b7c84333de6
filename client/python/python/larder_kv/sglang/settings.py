"""What users choose: the keys of `hicache_storage_backend_extra_config` that are Larder's, parsed once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Keys that say which class is loaded, and how it is called. SGLang takes those for itself away that are its own."""


class UnsupportedError(ValueError):
    """The engine is set up in a way that cannot be served: it refuses to start, and says what to change."""


@dataclass(frozen=True)
class Settings:
    """The storage's settings. A key that is none of them is an error."""

    socket: str
    """The tenant's socket of the node on this host."""
    device: int | None = None
    """Which of the node's actors the engine talks to, by number; the node chooses where not given."""
    window_bytes: int = 64 << 20
    """Write window that each rank asks of the node: room for two pages at least."""
    timeout_seconds: float = 10.0
    """How long one request to the node may take. A call from SGLang begins none later than that."""
    reconnect_seconds: float = 1.0
    """How often a node that is not there is tried again."""
    model_revision: str = ""
    """Says which weights the model has where neither SGLang nor the files do; part of every key."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "Settings":
        """Reads what SGLang passes on of its extra configuration."""
        known = {field.name for field in fields(cls)}
        ours = {key: value for key, value in extra.items() if key not in OF_SGLANG}
        for key in ours:
            if key not in known:
                raise UnsupportedError(f"the storage's configuration has `{key}`, which is none of {sorted(known)}")
        if "socket" not in ours:
            raise UnsupportedError("the storage's configuration needs `socket`: the path of the node's socket")
        if not extra.get("interface_v1"):
            raise UnsupportedError('the storage\'s configuration needs `"interface_v1": 1`: pages are copied in place')
        settings = cls(**ours)
        for name in ("timeout_seconds", "reconnect_seconds"):
            if getattr(settings, name) <= 0:
                raise UnsupportedError(f"`{name}` must be more than 0")
        return settings
