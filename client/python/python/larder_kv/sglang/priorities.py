"""Turns SGLang's priorities of requests into priorities of the pages that it saves.

SGLang tells a storage nothing about requests. Its tree of prefixes knows each request's priority. A hook there (SGLang's own
registry of hooks) notes the priority under the hashes of the prompt's pages, before SGLang saves the pages.
"""

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("sglang.larder")

MOST_PAGES = 65_536
"""Pages whose priorities are remembered."""
INSERT = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert"


class Priorities:
    """The priorities of the latest pages of requests that had a priority; a page of several requests has the highest."""

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most, self._lock = most, threading.Lock()
        self._known: OrderedDict[str, int] = OrderedDict()

    def note(self, keys: Sequence[str], priority: int) -> None:
        """Notes that a request with this priority has these pages."""
        clamped = min(max(priority, -128), 127)
        with self._lock:
            for key in keys:
                self._known[key] = max(clamped, self._known.pop(key, clamped))
            while len(self._known) > self._most:
                self._known.popitem(last=False)

    def of(self, keys: Sequence[str]) -> list[int]:
        """The priorities of these pages; 0 if none is known."""
        with self._lock:
            return [self._known.get(key, 0) for key in keys]


_heard: "weakref.WeakKeyDictionary[Any, Priorities]" = weakref.WeakKeyDictionary()
_is_hooked = False


def hear(storage: Any) -> Priorities:
    """The priorities of the requests that a storage's cache gets from now on."""
    _heard[storage] = priorities = Priorities()
    _hook()
    return priorities


def inserted(result: Any, cache: Any, params: Any) -> None:
    """A request was inserted into SGLang's tree. An error here does not reach SGLang."""
    try:
        priority, node = getattr(params, "priority", None), getattr(result, "last_device_node", None)
        storage = getattr(cache.cache_controller, "storage_backend", None) if priority else None
        priorities = _heard.get(storage) if storage is not None else None
        if priority and priorities is not None and node is not None:
            tree = cache.tree_core
            priorities.note([*tree.get_prefix_hash_values(node), *tree.get_hash_values(node)], int(priority))
    except Exception:
        # Logged once: the next insertion would fail as well.
        _heard.clear()
        logger.warning("the priorities of requests are not used from now on", exc_info=True)


def _hook() -> None:
    """Hooks into SGLang's tree, once."""
    global _is_hooked
    if _is_hooked:
        return
    _is_hooked = True
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(INSERT, inserted, HookType.AFTER)
        HookRegistry.apply_hooks()
    except (ImportError, AttributeError) as error:
        logger.warning("SGLang's priorities are not used: this SGLang has no hooks that Larder knows: %s", error)
