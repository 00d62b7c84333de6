"""For vLLM: the connector (`kv_connector="LarderConnector"`, `kv_connector_module_path="larder_kv.vllm"`), and a tier below
vLLM's own offloading (`LarderTier`).

Importing this package needs no vLLM; naming either class does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from larder_kv.vllm.connector import LarderConnector
    from larder_kv.vllm.tier import LarderTier

__all__ = ["LarderConnector", "LarderTier"]


def __getattr__(name: str) -> object:
    if name == "LarderConnector":
        from larder_kv.vllm.connector import LarderConnector

        return LarderConnector
    if name == "LarderTier":
        from larder_kv.vllm.tier import LarderTier

        return LarderTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
