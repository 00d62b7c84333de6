"""SGLang's own radix cache, cache controller, host pools and storage threads on the CPU, with Larder behind them."""

import atexit
import contextlib
import functools
import hashlib
import json
import time
from array import array
from unittest import mock

import sglang_stubs

sglang_stubs.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402
from sglang.test.kits.unified_radix_cache import fixtures  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402

PAGE = 16
PATIENCE_SECONDS = 60.0
IO_BACKENDS = {"layer_first": "direct", "page_first_direct": "direct", "page_first": "kernel", "page_head": "kernel"}
HYBRID = {"num_layers": 8, "full_attention_layer_ids": (3, 7), "kv_size": 512}
WINDOW = 2 * PAGE
FULL = {"components": (ComponentType.FULL,), "num_layers": 4, "kv_size": 512}
KINDS = {
    "full": FULL,
    "latent": FULL,
    "state": HYBRID | {"components": (ComponentType.FULL, ComponentType.MAMBA), "enable_mamba_extra_buffer": True},
    "window": HYBRID | {"components": (ComponentType.FULL, ComponentType.SWA), "sliding_window_size": WINDOW},
}
DEVICE_ADDRESSES = {
    "device_k_data_ptrs": "device_k_buffers",
    "device_v_data_ptrs": "device_v_buffers",
    "device_data_ptrs": "device_kv_buffers",
}

fixtures.get_device = lambda *_: "cpu"
# Kept, since they end when they are dropped.
PLACES = []


class HostCache:
    """One engine's caches: on the device (here the CPU too), on the host, and Larder behind them."""

    SERVER = {}
    """Arguments of the server besides those of its cache."""

    def __init__(
        self,
        storage: dict,
        layout: str,
        kind: str = "full",
        dtype: str = "bfloat16",
        without_addresses: bool = False,
        rank: int = 0,
        ranks: int = 1,
        meeting: str | None = None,
    ):
        self.kind, self.rank = kind, rank
        sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), ranks)
        PLACES.append(get_parallel().override(tp_rank=rank, pp_rank=0, pp_size=1, **sizes))
        PLACES[-1].__enter__()
        shape = CacheConfig(page_size=PAGE, head_num=2, head_dim=64, dtype=getattr(torch, dtype), **KINDS[kind])
        with built_with(group_of(rank, ranks, meeting), latent_pool if kind == "latent" else MHATokenToKVPool):
            self.cache, self.allocator, self.requests = fixtures.build_fixture(shape)
        arguments = server_arguments(layout, storage, self.SERVER)
        set_global_server_args_for_scheduler(arguments)
        # A process of SGLang has one cache, and one collector of metrics.
        self.cache._enable_metrics_flag, self.cache.storage_metrics_collector = True, mock.MagicMock(labels={})
        with no_addresses() if without_addresses else contextlib.nullcontext():
            self.cache.init_hicache(arguments, self.cache.cache_init_params)
        fixtures.drop_hicache_atexit_pin(self.cache)
        self.cache.write_through_threshold = 1 << 30
        self.cache.load_back_threshold = 0
        controller = self.cache.cache_controller
        assert controller.storage_host_pool.layout == layout, "SGLang chose another layout"
        # The controller's own capacity is meant for engines whose host pool is larger than the device's.
        controller.prefetch_capacity_limit = controller.mem_pool_host.size
        self.name_device_layers(controller)
        self.storage = controller.storage_backend
        self.attempts = 0
        atexit.register(self.close)

    @staticmethod
    def name_device_layers(controller) -> None:
        """Lets stand-ins for kernels find tensors by the names under which kernels get addresses."""
        pool = controller.storage_host_pool
        for addresses, layers in DEVICE_ADDRESSES.items():
            if hasattr(pool, layers):
                setattr(pool, addresses, getattr(pool, layers))

    def put(self, tokens: list[int], salt: str | None = None, priority: int = 0) -> None:
        """Computes a prompt: its pages get content of their own."""
        rows = self._rows(len(tokens))
        inserted = InsertParams(key=self._key(tokens, salt), value=rows, priority=priority)
        if self.kind == "state":
            inserted.mamba_value = self.requests.mamba_allocator.alloc(1)
            assert inserted.mamba_value is not None
        # With latent attention, all ranks have the same rows.
        rank = 0 if self.kind == "latent" else self.rank
        random = torch.Generator().manual_seed((tokens[0] * 1_000 + len(tokens)) * 10 + rank)
        self.fill(rows[self._match(tokens, salt).device_prefix_len :], random)
        for state in self._states():
            part = state[:, inserted.mamba_value]
            state[:, inserted.mamba_value] = torch.randn(part.shape, generator=random).to(part.dtype)
        self.cache.insert(inserted)

    def fill(self, rows: torch.Tensor, random: torch.Generator) -> None:
        """Computes these rows."""
        for layers, part in ((self._kv_layers(), rows), self._window(rows)):
            for layer in layers:
                layer[part] = torch.randn(layer[part].shape, generator=random).to(layer.dtype)

    def save(self, tokens: list[int], salt: str | None = None) -> None:
        """Copies a prompt from the device to the host, and from there to the storage."""
        nodes, node = [], self._match(tokens, salt).last_device_node
        while node != self.cache.root_node_handle():
            nodes.append(node)
            node = fixtures.node_parent(self.cache, node)
        for node in reversed(nodes):
            if self.cache.tree_core.is_backuped(node):
                self.cache.write_backup_storage(node)
            else:
                fixtures.write_backup(self.cache, node, write_back=True)
        self.cache.writing_check(write_back=True)
        self.until(lambda: not self.cache.ongoing_backup, self.cache.drain_storage_control_queues)

    def restore(self, tokens: list[int], salt: str | None = None) -> int:
        """Loads the cached part of a prompt from the storage to the host and the device; returns the number of tokens that are
        there then."""
        before = self._match(tokens, salt)
        known = before.device_prefix_len + before.host_hit_length
        self.attempts += 1
        handle = CacheRequestHandle(rid=f"request-{self.attempts}", attempt_id=0)
        node = before.last_host_node
        self.cache.prefetch_from_storage(
            handle,
            node,
            array("q", tokens[known:]),
            self.cache.get_last_hash_value(node),
            self.cache.get_prefix_hash_values(node) if self.cache.hicache_storage_pass_prefix_keys else None,
            matched_prefix_tokens=array("q", tokens[:known]),
            cache_salt=salt,
        )
        self.until(lambda: self.cache.check_prefetch_progress(handle), self.cache.check_hicache_events)
        match = self._match(tokens, salt)
        if match.host_hit_length:
            self.cache.load_back(match.best_match_node, req=None)
            self.cache.ready_to_load_host_cache()
            self.cache.loading_check()
        return self._match(tokens, salt).device_prefix_len

    def digest(self, tokens: list[int], salt: str | None = None) -> str:
        """A digest of a prompt's content on the device: its KV, and the state or the window at its end, if there is one."""
        node = self._match(tokens, salt).last_device_node
        rows = self.cache.path_device_indices(node)
        content = self.digest_of(rows)
        if self.kind == "state":
            slot = fixtures.node_device_value(self.cache, node, ComponentType.MAMBA)
            assert slot is not None, "there is no state at the prefix's end"
            for state in self._states():
                content.update(state[:, slot].contiguous().view(torch.uint8).numpy().tobytes())
        return content.hexdigest()

    def digest_of(self, rows: torch.Tensor):
        """A digest of the content of these rows, to which more can be added."""
        content = hashlib.sha256()
        for layers, part in ((self._kv_layers(), rows), self._window(rows[-WINDOW:])):
            for layer in layers:
                content.update(layer[part].contiguous().view(torch.uint8).numpy().tobytes())
        return content

    def stored(self, tokens: list[int], salt: str | None = None) -> int:
        """The number of a prompt's tokens that the storage has, besides those that are here; asked as a decode engine asks."""
        match = self._match(tokens, salt)
        rest = array("q", tokens[match.device_prefix_len + match.host_hit_length :])
        last_hash = self.cache.get_last_hash_value(match.last_host_node)
        return self.cache.query_storage_hit_length(match.last_host_node, rest, last_hash, cache_salt=salt)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.cache.cache_controller.detach_storage_backend()

    def _key(self, tokens: list[int], salt: str | None) -> RadixKey:
        return RadixKey(array("q", tokens), cache_salt=salt)

    def _match(self, tokens: list[int], salt: str | None):
        return self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens, salt)))

    def _rows(self, tokens: int) -> torch.Tensor:
        """Rows of the device's pools for new tokens."""
        if self.kind != "window":
            return self.allocator.alloc(tokens)
        # The allocator's own method needs the tensors of a batch.
        rows = self.allocator.full_attn_allocator.alloc(tokens)
        self.allocator.full_to_swa_index_mapping[rows] = self.allocator.swa_attn_allocator.alloc(tokens)
        return rows

    def _window(self, rows: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The layers that have a window, and the places of these rows in them."""
        if self.kind != "window":
            return [], rows
        pool = self.allocator.get_kvcache().swa_kv_pool
        return [*pool.k_buffer, *pool.v_buffer], self.allocator.full_to_swa_index_mapping[rows]

    def _kv_layers(self) -> list[torch.Tensor]:
        pool = self.allocator.get_kvcache()
        pool = getattr(pool, "full_kv_pool", pool)
        if self.kind == "latent":
            return list(pool.kv_buffer)
        return [*pool.k_buffer, *pool.v_buffer]

    def _states(self) -> list[torch.Tensor]:
        if self.kind != "state":
            return []
        states = self.requests.mamba_pool.mamba_cache
        return [states.temporal, *states.conv]

    def until(self, condition, pump) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        pump()
        while not condition():
            assert time.monotonic() < deadline, "SGLang did not end in time"
            time.sleep(0.001)
            pump()


def server_arguments(layout: str, storage: dict, more: dict) -> ServerArgs:
    arguments = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        hicache_io_backend=IO_BACKENDS[layout],
        hicache_mem_layout=layout,
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps({"model_revision": "1"} | storage),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_ratio=2.0,
        **more,
    )
    arguments._mamba_cache_chunk_size = max(CHUNK_SIZE, PAGE)
    return arguments


def group_of(rank: int, ranks: int, meeting: str | None) -> dist.ProcessGroup | None:
    """The ranks that have to agree, if they meet."""
    if meeting is None:
        return None
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    return dist.group.WORLD


@contextlib.contextmanager
def built_with(group: dist.ProcessGroup | None, pool):
    """Extends SGLang's own builder of caches, which has neither ranks nor latent attention."""
    parameters = functools.partial(CacheInitParams, tp_cache_group=group)
    with (
        mock.patch.object(fixtures, "CacheInitParams", parameters),
        mock.patch.object(fixtures, "MHATokenToKVPool", pool),
    ):
        yield


def latent_pool(*, head_num: int, head_dim: int, **shape) -> MLATokenToKVPool:
    """A device's pool of latent rows of about the same size."""
    return MLATokenToKVPool(kv_lora_rank=head_num * head_dim, qk_rope_head_dim=head_dim // 2, **shape)


def no_addresses():
    """Makes host pools like those whose layouts have no addresses of pages."""
    unsupported = ValueError("Unsupported layout")
    return mock.patch.object(MHATokenToKVPoolHost, "get_page_buffer_meta", side_effect=unsupported)
