"""The remote connector that LMCache's engine loads in its process: `remote_storage_plugins: ["larder"]`."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from lmcache.utils import CacheEngineKey
from lmcache.v1 import token_database
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from larder_kv.keyed import Counts, Keyed
from larder_kv.lmcache.blocks import Buffers, digest, namespace
from larder_kv.namespace import NamespaceSpec
from larder_kv.prometheus import exporter
from larder_kv.settings import NodeSettings, UnsupportedError

T = TypeVar("T")
Keys: TypeAlias = list[CacheEngineKey]
Chunks: TypeAlias = list[MemoryObj | None]

logger = logging.getLogger("lmcache.larder")

PLUGIN = "larder"
THREADS = 4
QUEUED_SAVES = 64
"""Limit of calls to save that wait or are under way; further calls are shed."""


class LarderAdapter(ConnectorAdapter):
    """The class of LMCache's plugin `larder` (or `larder.NAME`)."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN}")

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """A connector for this rank. Raises an error that stops LMCache if the engine cannot be served."""
        try:
            return LarderConnector(context)
        except UnsupportedError as error:
            # LMCache only logs any other error, and goes on without a cache.
            raise IrrecoverableException(str(error)) from error


class LarderConnector(RemoteConnector):
    """Chunks of LMCache in Larder. Its coroutines run on LMCache's event loop; waits and copies run on its own threads."""

    def __init__(self, context: ConnectorContext) -> None:
        config, metadata = context.config, context.metadata
        super().__init__(config, metadata)
        check(config)
        self.settings = settings = NodeSettings.parse(*settings_of(config, context.plugin_name or PLUGIN))
        settings.check_block("a chunk", self.full_chunk_size_bytes)
        self._config, self._metadata = config, metadata
        self._allocator = context.local_cpu_backend
        self._spec_once = threading.Lock()
        self._spec: NamespaceSpec | None = None
        labels = {"model_name": str(metadata.model_name), "worker_id": str(metadata.worker_id)}
        self.counts = Counts(exporter("lmcache:larder", labels))
        client = f"lmcache {metadata.model_name} rank {metadata.worker_id}"
        self._link = settings.link(client, logger, self.counts.add)
        self._keyed = Keyed(self._link, self.counts, settings.timeout_seconds, logger)
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "larder")
        self._saves = threading.BoundedSemaphore(QUEUED_SAVES)
        self._link.wait_for_first_try(settings.reconnect_seconds)

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the chunk can be loaded."""
        return await self._on_thread(lambda: self.exists_sync(key))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """`exists`, on the caller's thread."""
        return self._present([key]) == 1

    def support_batched_contains(self) -> bool:
        """Batched lookups are supported."""
        return True

    def batched_contains(self, keys: Keys) -> int:
        """Number of chunks that can be loaded, from the first on."""
        return self._present(keys)

    async def batched_async_contains(self, lookup_id: str, keys: Keys, pin: bool = False) -> int:
        """`batched_contains` for a coroutine."""
        return await self._on_thread(lambda: self._present(keys))

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Loads a chunk; None if it does not come."""
        return (await self._load([key]))[0]

    def support_batched_get(self) -> bool:
        """Batched loads are supported."""
        return True

    async def batched_get(self, keys: Keys) -> Chunks:
        """Loads chunks; None for the first chunk that does not come, and for all chunks after it."""
        return await self._load(keys)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Keys) -> list[MemoryObj]:
        """Loads chunks, and returns those that came, from the first on."""
        return [chunk for chunk in await self._load(keys) if chunk is not None]

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Saves a chunk, or counts that it was not saved."""
        await self._save([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Batched saves are supported."""
        return True

    async def batched_put(self, keys: Keys, memory_objs: list[MemoryObj]) -> None:
        """Saves chunks, or counts the chunks that were not saved."""
        await self._save(keys, memory_objs)

    async def list(self) -> list[str]:
        """Returns nothing: chunks belong to a whole cluster."""
        return []

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Removes nothing: chunks are shared, and the nodes evict unused chunks."""
        return False

    async def close(self) -> None:
        """Waits for the calls under way, and ends the session."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self._threads.shutdown()
        self._link.close()

    def _present(self, keys: Sequence[CacheEngineKey]) -> int:
        found = self._keyed.exists(self._namespace(), [digest_of(key) for key in keys])
        return found.index(False) if False in found else len(found)

    async def _load(self, keys: Sequence[CacheEngineKey]) -> Chunks:
        def give_back(chunks: Chunks) -> None:
            for chunk in chunks:
                if chunk is not None:
                    chunk.ref_count_down()

        return await self._on_thread(lambda: self._load_now(keys), unwanted=give_back)

    def _load_now(self, keys: Sequence[CacheEngineKey]) -> Chunks:
        chunks: list[Any] = []
        loaded = 0
        try:
            for _ in keys:
                chunk = self._allocator.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
                if chunk is None:
                    break
                chunks.append(chunk)
            wanted = [digest_of(key) for key in keys[: len(chunks)]]
            loaded = self._keyed.load(self._namespace(), wanted, Buffers([chunk.byte_array for chunk in chunks]))
        finally:
            for chunk in chunks[loaded:]:
                chunk.ref_count_down()
        return chunks[:loaded] + [None] * (len(keys) - loaded)

    async def _save(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        # LMCache takes its own reference back when a call ends, even if the call was cancelled and its thread still copies.
        if not self._saves.acquire(blocking=False):
            self.counts.add("shed_keys", len(keys))
            return
        for chunk in chunks:
            chunk.ref_count_up()
        try:
            task = self._threads.submit(self._save_now, keys, chunks)
        except RuntimeError:
            self._saved(chunks)
            raise
        task.add_done_callback(lambda _: self._saved(chunks))
        await asyncio.wrap_future(task)

    def _saved(self, chunks: Sequence[MemoryObj]) -> None:
        self._saves.release()
        for chunk in chunks:
            chunk.ref_count_down()

    def _save_now(self, keys: Sequence[CacheEngineKey], chunks: Sequence[MemoryObj]) -> None:
        # A prompt's last, partial chunk is always computed again.
        whole = [
            (digest_of(key), chunk.byte_array)
            for key, chunk in zip(keys, chunks, strict=True)
            if chunk.get_size() == self.full_chunk_size_bytes
        ]
        self.counts.add("shed_keys", len(keys) - len(whole))
        self._keyed.save(self._namespace(), [key for key, _ in whole], Buffers([buffer for _, buffer in whole]))

    async def _on_thread(self, call: Callable[[], T], unwanted: Callable[[T], None] | None = None) -> T:
        """Runs a call on a thread; a result that is no longer awaited goes to `unwanted`."""
        task = self._threads.submit(call)
        try:
            return await asyncio.wrap_future(task)
        except asyncio.CancelledError:
            if unwanted is not None:
                task.add_done_callback(
                    lambda done: None if done.cancelled() or done.exception() else unwanted(done.result())
                )
            raise

    def _namespace(self) -> NamespaceSpec:
        # Made at its first use: LMCache chooses the seed of its hashes after it has made its connectors.
        with self._spec_once:
            if self._spec is None:
                shapes = [tuple(shape) for shape in self.meta_shapes]
                self._spec = namespace(
                    model=self._metadata.model_name,
                    revision=self.settings.model_revision,
                    dtype=" ".join(str(dtype).removeprefix("torch.") for dtype in self.meta_dtypes),
                    layout=f"{self.meta_fmt.name} {shapes}",
                    hashing=f"{self._config.pre_caching_hash_algorithm} {token_database.NONE_HASH}",
                    tokens=self._metadata.chunk_size,
                    block_bytes=self.full_chunk_size_bytes,
                )
            return self._spec


def digest_of(key: CacheEngineKey) -> bytes:
    """The key of a chunk. LMCache's text of a key tells its tags apart, unless they have the signs by which the text joins them."""
    tags = key.tags or ()
    if not any(sign in f"{name}{value}" for name, value in tags for sign in "@%"):
        return digest(key.to_string())
    fields = (field for tag in tags for field in tag)
    return digest(key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, key.dtype, *fields)


def check(config: LMCacheEngineConfig) -> None:
    """Raises `UnsupportedError` if chunks cannot be kept."""
    if config.remote_serde not in (None, "naive"):
        raise UnsupportedError(f"remote_serde is {config.remote_serde!r}: chunks are kept as they are, set it to naive")
    if config.use_layerwise:
        raise UnsupportedError("use_layerwise is not supported: chunks are kept whole, with all layers")
    if config.pre_caching_hash_algorithm == "builtin":
        raise UnsupportedError(
            "pre_caching_hash_algorithm is builtin, which is no cryptographic hash, and differs between builds of Python: "
            "set it to sha256_cbor"
        )


def settings_of(config: LMCacheEngineConfig, plugin: str) -> tuple[dict[str, Any], str]:
    """The plugin's part of `extra_config`, and the part's name."""
    where = f"remote_storage_plugin.{plugin}"
    of_lmcache = {"module_path", "class_name"}
    given = {
        key.removeprefix(f"{where}."): value
        for key, value in (config.extra_config or {}).items()
        if key.startswith(f"{where}.")
    }
    # Settings of `larder.NAME` start from the settings of `larder`.
    return {key: value for key, value in given.items() if key not in of_lmcache and "." not in key}, where
