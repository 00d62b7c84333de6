"""The second level behind LMCache's server (multiprocess mode): an L2 adapter of type `plugin`."""

import concurrent.futures
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from larder_kv.keyed import Counts, Keyed
from larder_kv.lmcache.blocks import Buffers, digest, namespace
from larder_kv.namespace import NamespaceSpec
from larder_kv.prometheus import exporter
from larder_kv.settings import NodeSettings

T = TypeVar("T")

logger = logging.getLogger("lmcache.larder")

THREADS = 4
TASKS = 64
"""Limit of tasks that wait or are under way; further tasks fail at once."""
KINDS = 16
"""Kinds of objects, by shapes and data types, that one adapter keeps: each has a namespace of the session."""


class LarderL2Adapter(L2AdapterInterface):
    """Objects of LMCache in Larder. Tasks run on the adapter's threads; a failed task is a miss, or leaves its objects
    unstored."""

    def __init__(self, config: dict[str, Any], **_: Any) -> None:
        super().__init__()
        self.settings = settings = NodeSettings.parse(config, "adapter_params")
        self.counts = Counts(exporter("lmcache:larder_l2", {}))
        self._link = settings.link("lmcache server", logger, self.counts.add)
        self._keyed = Keyed(self._link, self.counts, settings.timeout_seconds, logger)
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "larder")
        self._waiting = threading.BoundedSemaphore(TASKS)
        self._lock = threading.Lock()
        self._tasks = 0
        self._specs: dict[str, NamespaceSpec] = {}
        self._refused: set[str] = set()
        self._stored: dict[L2TaskId, L2StoreResult] = {}
        self._found: dict[L2TaskId, Bitmap] = {}
        self._loaded: dict[L2TaskId, Bitmap] = {}
        self._store_events, self._lookup_events, self._load_events = (create_event_notifier() for _ in range(3))
        self._link.wait_for_first_try(settings.reconnect_seconds)

    def get_store_event_fd(self) -> int:
        """Readable when stores have ended."""
        return int(self._store_events.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when lookups have ended."""
        return int(self._lookup_events.fileno())

    def get_load_event_fd(self) -> int:
        """Readable when loads have ended."""
        return int(self._load_events.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Begins to store objects. Objects that are there already are not written again."""

        def store() -> L2StoreResult:
            done = self._each(keys, [kind_of(one) for one in objects], self._saver(keys, objects), "shed_keys")
            stored = [number for number, is_stored in enumerate(done) if is_stored]
            sizes = [objects[number].get_size() for number in stored]
            if stored:
                self._notify_keys_stored([keys[number] for number in stored], sizes)
            return L2StoreResult(len(stored) == len(keys), sum(sizes))

        return self._begin(store, "_stored", L2StoreResult(False, 0), self._store_events)

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """Stores that have ended since the last call."""
        with self._lock:
            stored, self._stored = dict(self._stored), {}
            return stored

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Begins to look objects up. Nothing is locked: an object that is evicted before its load is a miss."""
        kinds = [kind_of_layout(group_layout_descs.get(key.object_group_id)) for key in keys]

        def look(spec: NamespaceSpec, numbers: Sequence[int]) -> list[bool]:
            return self._keyed.exists(spec, [digest_of(keys[number]) for number in numbers])

        def look_up() -> Bitmap:
            return bitmap(self._each(keys, kinds, look))

        return self._begin(look_up, "_found", Bitmap(len(keys)), self._lookup_events)

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """The objects that a lookup has found; returned once."""
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Does nothing: no object is locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Begins to load objects."""

        def load() -> Bitmap:
            done = self._each(keys, [kind_of(one) for one in objects], self._loader(keys, objects))
            if any(done):
                self._notify_keys_accessed([key for key, is_loaded in zip(keys, done, strict=True) if is_loaded])
            return bitmap(done)

        return self._begin(load, "_loaded", Bitmap(len(keys)), self._load_events)

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        """The objects that a load has brought; returned once."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def report_status(self) -> dict[str, Any]:
        """The status for LMCache's status page. An absent node causes only misses, and a restart of the server would not help."""
        return {
            "type": type(self).__name__,
            "is_healthy": True,
            "has_node": self._link.current() is not None,
            **self.counts.now(),
        }

    def close(self) -> None:
        """Waits for the tasks under way, and ends the session."""
        self._threads.shutdown()
        self._link.close()
        for events in (self._store_events, self._lookup_events, self._load_events):
            events.close()

    def _begin(self, task: Callable[[], T], results: str, failed: T, events: Any) -> L2TaskId:
        """Runs a task on a thread; its result goes to the dictionary of that name."""
        with self._lock:
            self._tasks += 1
            number = self._tasks

        def run() -> None:
            result = failed
            try:
                result = task()
            except Exception:
                self.counts.add("failures")
                logger.exception("a task of LMCache failed")
            with self._lock:
                getattr(self, results)[number] = result
            events.notify()

        if self._waiting.acquire(blocking=False):
            self._threads.submit(run).add_done_callback(lambda _: self._waiting.release())
        else:
            with self._lock:
                getattr(self, results)[number] = failed
            self.counts.add("busy")
            events.notify()
        return number

    def _saver(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> Callable[[NamespaceSpec, Sequence[int]], list[bool]]:
        def save(spec: NamespaceSpec, numbers: Sequence[int]) -> list[bool]:
            buffers = Buffers([objects[number].byte_array for number in numbers])
            return self._keyed.save(spec, [digest_of(keys[number]) for number in numbers], buffers)

        return save

    def _loader(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> Callable[[NamespaceSpec, Sequence[int]], list[bool]]:
        def load(spec: NamespaceSpec, numbers: Sequence[int]) -> list[bool]:
            # A missing object must not hide the objects after it.
            wanted = [digest_of(keys[number]) for number in numbers]
            there = [place for place, is_there in enumerate(self._keyed.exists(spec, wanted)) if is_there]
            buffers = Buffers([objects[numbers[place]].byte_array for place in there])
            loaded = there[: self._keyed.load(spec, [wanted[place] for place in there], buffers)]
            return [place in loaded for place in range(len(wanted))]

        return load

    def _each(
        self,
        keys: Sequence[ObjectKey],
        kinds: Sequence[tuple[str, int] | None],
        call: Callable[[NamespaceSpec, Sequence[int]], list[bool]],
        counter: str | None = None,
    ) -> list[bool]:
        """Calls once for each kind of the named objects, and returns the answers in the order of the objects. Objects of refused
        kinds are added to `counter`."""
        groups: dict[NamespaceSpec, list[int]] = {}
        for number, (key, kind) in enumerate(zip(keys, kinds, strict=True)):
            if (spec := self._namespace(key, kind)) is not None:
                groups.setdefault(spec, []).append(number)
        if counter is not None:
            self.counts.add(counter, len(keys) - sum(map(len, groups.values())))
        done = [False] * len(keys)
        for spec, numbers in groups.items():
            for number, answer in zip(numbers, call(spec, numbers), strict=True):
                done[number] = answer
        return done

    def _namespace(self, key: ObjectKey, kind: tuple[str, int] | None) -> NamespaceSpec | None:
        """The namespace of a kind of objects; None for a kind that the adapter refuses."""
        if kind is None:
            return None
        layout, size = kind
        name = f"{key.model_name}@{layout}"
        with self._lock:
            if name not in self._specs:
                if why := self._why_refused(size):
                    self._warn_once(name, why)
                    return None
                self._specs[name] = namespace(
                    model=key.model_name,
                    revision=self.settings.model_revision,
                    dtype="as its layout",
                    layout=f"mp {layout}",
                    hashing="mp",
                    tokens=1,
                    block_bytes=size,
                )
            return self._specs[name]

    def _why_refused(self, size: int) -> str | None:
        """Why the adapter takes no new kind of objects of this size."""
        if size > self.settings.window_bytes:
            return (
                f"they have {size} bytes, more than the write window: set `window_bytes` to {2 * size} or more, and the node's "
                "`session.max_window_bytes` too"
            )
        return f"{KINDS} kinds are in use: give further models a server of their own" if len(self._specs) >= KINDS else None

    def _warn_once(self, kind: str, why: str) -> None:
        """Logs why objects of a kind are not stored: once for each kind, and for as many kinds as the adapter keeps."""
        if kind not in self._refused and len(self._refused) < KINDS:
            self._refused.add(kind)
            logger.warning("objects of %s are not stored: %s", kind, why)


def digest_of(key: ObjectKey) -> bytes:
    """The key of an object: all fields by which LMCache tells objects apart."""
    return digest(key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)


def kind_of(one: MemoryObj) -> tuple[str, int]:
    """The kind of an object: its shapes and data types, and their number of bytes."""
    # Metadata of objects with one part have no lists.
    shapes = getattr(one.metadata, "shapes", None) or [one.get_shape()]
    return kind(shapes, getattr(one.metadata, "dtypes", None) or [one.get_dtype()])


def kind_of_layout(layout: MemoryLayoutDesc | None) -> tuple[str, int] | None:
    """The kind of an object, from a lookup's layout."""
    return None if layout is None else kind(layout.shapes, layout.dtypes)


def kind(shapes: Sequence[Any], dtypes: Sequence[Any]) -> tuple[str, int]:
    """Shapes and data types as a text, and their bytes."""
    pairs = list(zip(shapes, dtypes, strict=True))
    text = " ".join(f"{tuple(shape)}:{str(dtype).removeprefix('torch.')}" for shape, dtype in pairs)
    return text, sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)


def bitmap(done: Sequence[bool]) -> Bitmap:
    """LMCache's form of a list of answers."""
    made = Bitmap(len(done))
    for number, answer in enumerate(done):
        if answer:
            made.set(number)
    return made
