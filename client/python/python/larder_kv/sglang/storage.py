"""The storage that SGLang loads: turns its calls on host pools and page hashes into calls on keys of a Larder node."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

import larder_kv
from larder_kv.keyed import Counts, Keyed
from larder_kv.prometheus import exporter
from larder_kv.settings import NodeSettings, UnsupportedError
from larder_kv.sglang import engine
from larder_kv.sglang.facts import Facts
from larder_kv.sglang.hits import PoolPages, fold, leading
from larder_kv.sglang.metrics import Transfers
from larder_kv.sglang.pages import Pages, digests
from larder_kv.sglang.pools import HostPool, HostPools
from larder_kv.sglang.priorities import hear

logger = logging.getLogger("sglang.larder")

KV, MAMBA = "kv", "mamba"
NAMESPACES = 16
"""The most namespaces of one session."""


class LarderStorage(HiCacheStorage):
    """One rank's storage. Called by SGLang's storage threads; a fault of the node is a miss, or leaves pages unsaved."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        self._config = storage_config
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise UnsupportedError(NEEDS_V1)
        ours = {key: value for key, value in extra.items() if key not in OF_SGLANG}
        self.settings = settings = NodeSettings.parse(ours, "the storage's configuration")
        self._pools = HostPools()
        self._facts: Facts | None = None
        self._specs: dict[str, larder_kv.NamespaceSpec] = {}
        # Part of the names of pages since the storage was cleared; empty before.
        self._salt = b""
        labels = {name: str(getattr(storage_config, name)) for name in LABELS}
        self.counts = Counts(exporter("sglang:larder", labels) if storage_config.enable_storage_metrics else None)
        self._transfers = Transfers()

        client = f"sglang {storage_config.model_name} rank {storage_config.tp_rank}"
        self._link = settings.link(client, logger, self.counts.add)
        self._keyed = Keyed(self._link, self.counts, settings.timeout_seconds, logger)
        self._priorities = hear(self)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the pool of the KV, and waits until the node was tried once."""
        super().register_mem_pool_host(mem_pool_host)
        self._facts = engine.read(self._config, int(mem_pool_host.page_size), self.settings)
        self._add(KV, mem_pool_host, self._config.is_mla_model)
        self._link.wait_for_first_try(self.settings.reconnect_seconds)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Takes a pool besides the KV."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == KV:
            return
        # If all ranks have the same KV, SGLang has the first rank save it, and all ranks save only the recurrent state.
        is_replicated = self._config.is_mla_model and name != MAMBA
        if is_replicated and self._config.tp_size > 1 and "MHA" in type(host_pool).__name__:
            raise UnsupportedError(
                f"the pool {name} differs from rank to rank, and SGLang saves that of the first one alone: turn speculative "
                "decoding off, or its draft's attention must be the model's"
            )
        self._add(name, host_pool, is_replicated)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Number of pages that can be loaded, from the first on."""
        return leading(self._present(KV, keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The part of these pages that can be restored with all needed pools."""
        kv_pages = leading(self._present(KV, keys))
        pools = [self._pool_pages(transfer, keys[:kv_pages]) for transfer in pool_transfers or () if kv_pages]
        hits = fold(kv_pages, pools)
        return PoolTransferResult(hits.pages, dict(hits.of_pool), hits.restorable)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Loads pages into the host pool, up to the first page that does not come."""
        return self._load(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Saves pages of the host pool. A page that is there already is not written again."""
        return self._save(KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_get_v1`, for pools besides the KV."""
        return self._each(transfers, self._load)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_set_v1`, for pools besides the KV."""
        return self._each(transfers, self._save)

    def exists(self, key: str) -> bool:
        """Whether one page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Not used with `interface_v1`."""
        raise NotImplementedError(NEEDS_V1)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> None:
        """Not used with `interface_v1`."""
        raise NotImplementedError(NEEDS_V1)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not used with `interface_v1`."""
        raise NotImplementedError(NEEDS_V1)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not used with `interface_v1`."""
        raise NotImplementedError(NEEDS_V1)

    def clear(self) -> None:
        """Begins with an empty storage, as the weights may have changed, which no namespace knows. The pages so far belong to
        other engines too and stay; from now on this rank names its pages so that no name is known yet."""
        self._salt = os.urandom(16)
        logger.warning(
            "SGLang clears its storage: until it starts again, this engine shares no pages with other engines; the nodes evict "
            "unused pages"
        )

    def get_stats(self) -> Any:
        """Figures for SGLang's metrics since the last call."""
        return self._transfers.take()

    def close(self) -> None:
        """Ends the session, and lets go of the host pools."""
        self._link.close()
        self._pools.clear()

    def _add(self, name: str, host_pool: Any, is_replicated: bool) -> None:
        if self._facts is None:
            raise RuntimeError("SGLang registers the pool of the KV before all others")
        self._pools.add(name, host_pool, is_replicated)
        if (pool := self._pools.get(name)) is None:
            return
        if len(self._specs) == NAMESPACES and name not in self._specs:
            raise UnsupportedError(
                f"there are more host pools than the {NAMESPACES} namespaces that a session may have"
            )
        self.settings.check_block(f"a page of the pool {name}", sum(pool.facts.sizes))
        self._specs[name] = self._facts.namespace(pool.facts)

    def _present(self, name: str, keys: Sequence[str]) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None:
            return [True] * len(keys)
        return self._keyed.exists(self._specs[name], digests(keys, self._salt))

    def _pool_pages(self, transfer: PoolTransfer, keys: list[str]) -> PoolPages:
        name = str(transfer.name)
        return PoolPages(
            name,
            transfer.hit_policy.value,
            self._present(name, keys),
            trailing=max(len(transfer.keys or ()), 1),
            block_pages=transfer.block_pages,
            group_pages=transfer.group_pages,
        )

    def _load(self, name: str, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None:
            return [True] * len(keys)
        with self._transfers.measured("prefetch_pgs", "prefetch_bandwidth", sum(pool.facts.sizes)) as moved:
            pages = self._pages(pool, keys, host_indices)
            loaded = self._keyed.load(self._specs[name], digests(keys, self._salt), pages)
            moved.append(loaded)
        return [number < loaded for number in range(len(keys))]

    def _save(self, name: str, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None:
            return [True] * len(keys)
        with self._transfers.measured("backup_pgs", "backup_bandwidth", sum(pool.facts.sizes)) as moved:
            pages, priorities = self._pages(pool, keys, host_indices), self._priorities.of(keys)
            saved = self._keyed.save(self._specs[name], digests(keys, self._salt), pages, priorities)
            moved.append(sum(saved))
        return saved

    def _pages(self, pool: HostPool, keys: Sequence[str], host_indices: torch.Tensor) -> Pages:
        if host_indices.numel() != len(keys) * pool.page_rows:
            raise ValueError(f"{len(keys)} pages of {pool.page_rows} rows, but {host_indices.numel()} indices")
        return Pages(self._pools.memory, *pool.pieces(host_indices), len(pool.facts.sizes))

    def _each(
        self, transfers: list[PoolTransfer], move: Callable[[str, Sequence[str], torch.Tensor], list[bool]]
    ) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys = transfer.keys or []
            # SGLang counts the loaded pages by the names that it gave.
            results[transfer.name] = move(str(transfer.name), keys, transfer.host_indices) if keys else []
        return results


OF_SGLANG = frozenset(
    "backend_name module_path class_name interface_v1 prefetch_threshold prefetch_timeout_base prefetch_timeout_per_ki_token "
    "hicache_storage_pass_prefix_keys file_storage_path".split()
)
"""The keys that SGLang reads from the storage's configuration. Its cache removes some of them; its decode engines' offloading
does not."""
LABELS = ("model_name", "tp_rank", "pp_rank")
NEEDS_V1 = 'the storage copies pages in place: its configuration needs `"interface_v1": 1`'
