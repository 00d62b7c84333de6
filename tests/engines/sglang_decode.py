"""The decode side of SGLang's prefill and decode, with SGLang's own queues and its own offloading, but without a prefill server:
the rows already have what it would send."""

from array import array
from types import SimpleNamespace

import torch
import torch.distributed as dist
from sglang_host import PAGE, HostCache

from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest, DecodeTransferQueue
from sglang.srt.disaggregation.decode_hicache_mixin import HiCacheRestoreResult
from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams


class Waiting(DecodePreallocQueue):
    """Requests that wait for room."""

    def __init__(self, host: HostCache):
        self.tree_cache, self.req_to_token_pool = host.cache, host.requests
        self.token_to_kv_pool_allocator, self.token_to_kv_pool = host.allocator, host.allocator.get_kvcache()
        self.scheduler = SimpleNamespace(
            enable_decode_hicache=True, enable_hisparse=False, tp_worker=SimpleNamespace(is_hybrid_swa=False)
        )


class Restoring(DecodeTransferQueue):
    """Requests whose KV is on its way."""

    def __init__(self, host: HostCache):
        self.tree_cache = host.cache


class DecodeCache(HostCache):
    """The caches of a decode engine: it loads the cached part of a prompt from the storage instead of having it sent, and
    offloads what it decodes."""

    SERVER = {
        "disaggregation_mode": "decode",
        "disaggregation_decode_enable_radix_cache": True,
        "disaggregation_decode_enable_offload_kvcache": True,
    }

    def __init__(self, **options):
        super().__init__(**options)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.waiting, self.restoring = Waiting(self), Restoring(self)
        self.offload = DecodeKVCacheOffloadManager(self.requests, self.allocator, dist.group.WORLD, self.cache)
        self.name_device_layers(self.offload.cache_controller)
        self.random = torch.Generator().manual_seed(1)

    def decode(self, tokens: list[int], output: list[int], salt: str | None) -> dict:
        """Serves a request whose output is known; returns how much of it the storage had, and the content of the device."""
        sampling = SamplingParams(max_new_tokens=len(output), ignore_eos=True)
        sampling.normalize(None)
        request = Req("decoded", "", array("q", tokens), sampling, cache_salt=salt, vocab_size=1 << 20)
        had = self._take_prefix(request)
        told = {"prefix": had, "prefix_digest": self.digest_of(self._row(request, 0, had)).hexdigest()}
        self.fill(self._row(request, had, len(tokens)), self.random)
        for token in output:
            if request.output_ids:
                self._compute_last_token(request)
            request.output_ids.append(token)
            request.update_finish_state()
            if request.finished():
                # The last token's KV is never computed.
                whole = (request.kv.kv_allocated_len // PAGE) * PAGE
                told |= {"whole": whole, "digest": self.digest_of(self._row(request, 0, whole)).hexdigest()}
            if not self.offload.offload_kv_cache(request) and request.finished():
                self.offload.finalize_release_on_finish(request)
            self.offload.check_offload_progress()
        assert request.finished() and not request.kv.kv_allocated_len, "SGLang goes on with the request"
        self.until(lambda: not self.offload.ongoing_backup, self.offload.check_offload_progress)
        return told | {"counts": self.offload.cache_controller.storage_backend.counts.now()}

    def close(self) -> None:
        self.offload.cache_controller.detach_storage_backend()
        super().close()

    def _take_prefix(self, request: Req) -> int:
        """Takes room for a request, and loads its cached part from the storage; returns the number of tokens."""
        match = self.waiting._match_prefix_and_lock(request)
        self.waiting._start_hicache_prefetch(request, match)
        self.waiting._pre_alloc(request, match.prefix_indices, match.l1_prefix_len, match.decode_prefix_len)
        request.kv.cache_protected_len = match.decode_prefix_len
        waiting = DecodeRequest(request, kv_receiver=None, prefix_match=match)

        def step() -> None:
            self.cache.check_hicache_events()
            self.restoring._process_hicache_local_restores([waiting])

        self.until(lambda: waiting.hicache_restore_status != HiCacheRestoreResult.PENDING, step)
        assert waiting.hicache_restore_status == HiCacheRestoreResult.READY, "SGLang could not restore the prefix"
        self.restoring._commit_hicache_local_restore_to_req(waiting)
        return match.decode_prefix_len

    def _compute_last_token(self, request: Req) -> None:
        rows, at = self.allocator.alloc(1), request.kv.kv_allocated_len
        self.requests.write((request.kv.req_pool_idx, slice(at, at + 1)), rows.to(torch.int32))
        request.kv.kv_allocated_len = request.kv.kv_committed_len = at + 1
        self.fill(rows, self.random)

    def _row(self, request: Req, start: int, end: int) -> torch.Tensor:
        """The rows of these tokens of a request on the device."""
        return self.requests.req_to_token[request.kv.req_pool_idx, start:end].to(torch.int64)
