"""The connector for vLLM: `kv_connector="LarderConnector"`, `kv_connector_module_path="larder_kv.vllm"`.

Importing this package needs no vLLM; naming the connector does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from larder_kv.vllm.connector import LarderConnector

__all__ = ["LarderConnector"]


def __getattr__(name: str) -> object:
    if name == "LarderConnector":
        from larder_kv.vllm.connector import LarderConnector

        return LarderConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
