"""The storage behind SGLang's hierarchical cache: `--hicache-storage-backend dynamic` with `module_path` `larder_kv.sglang` and
`class_name` `LarderStorage`.

Importing this package needs no SGLang; naming the class does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from larder_kv.sglang.storage import LarderStorage

__all__ = ["LarderStorage"]


def __getattr__(name: str) -> object:
    if name == "LarderStorage":
        from larder_kv.sglang.storage import LarderStorage

        return LarderStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
