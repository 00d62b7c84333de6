"""LMCache over Larder: `LarderAdapter`, a remote connector of its engine in the process, and `LarderL2Adapter`, a second level of
its server (multiprocess mode).

Importing this package needs no LMCache; naming the classes does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from larder_kv.lmcache.connector import LarderAdapter
    from larder_kv.lmcache.l2 import LarderL2Adapter

__all__ = ["LarderAdapter", "LarderL2Adapter"]


def __getattr__(name: str) -> object:
    if name == "LarderAdapter":
        from larder_kv.lmcache.connector import LarderAdapter

        return LarderAdapter
    if name == "LarderL2Adapter":
        from larder_kv.lmcache.l2 import LarderL2Adapter

        return LarderL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
