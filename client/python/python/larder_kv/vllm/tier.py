"""The class that vLLM's own offloading loads as a tier below its host memory: `"type": "LarderTier"`, `"module_path":
"larder_kv.vllm"`.

vLLM moves blocks between GPUs and host memory; the tier moves them between host memory and the node.
"""

import hashlib
import json
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import larder_kv
from larder_kv.identity import weights_of
from larder_kv.vllm.node import Node
from larder_kv.vllm.offload import Offload, Tier
from larder_kv.vllm.settings import TierSettings, UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector


HERE: tuple[Tier, ...] = ("device", "host", "disk")
"""The tiers of a host's own chunks."""


class LarderTier(SecondaryTierManager):
    """Chunks of vLLM's offloading in a Larder cluster, from the scheduler's process; interface: vLLM's SecondaryTierManager."""

    medium: ClassVar[Medium] = Medium.STORAGE
    # Chunks come from memory or disk, of this host or another: vLLM has one name for a tier.
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        locality: str | None = None,
        backpressure_detector: "BackpressureDetector | None" = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = TierSettings.parse(given | {"locality": locality}, "the tier LarderTier")
        self.locality = Locality(settings.locality) if settings.locality is not None else None
        namespace = namespace_of(offloading_spec, self.block_size_bytes, settings.model_revision)

        def open_session() -> larder_kv.Session:
            window_bytes = max(settings.window_bytes, self.block_size_bytes)
            return settings.open_session("larder-kv tier for vLLM", window_bytes, settings.device)

        self._node = Node(open_session, namespace, [0], settings.reconnect_seconds)
        self._node.wait_for_first_try(settings.reconnect_seconds)
        tiers = HERE if self.locality is Locality.LOCAL else ()
        self._offload = Offload(self._node, primary_kv_view, self.block_size_bytes, settings.threads, tiers)
        self._asked: dict[str, set[OffloadKey]] = {}
        # Stored keys that are not reported yet; None if no events are wanted.
        self._stored: list[OffloadKey] | None = [] if offloading_spec.kv_events_config.enable_kv_cache_events else None
        self._storing: dict[int, list[OffloadKey]] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        check_hash(key)
        self._asked.setdefault(req_context.req_id, set()).add(key)
        found = self._offload.lookup(key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        for key in keys:
            check_hash(key)
        if self._stored is not None:
            self._storing[job_metadata.job_id] = keys
        self._offload.store(job_metadata.job_id, keys, rows_of(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._offload.load(job_metadata.job_id, list(job_metadata.keys), rows_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = self._offload.finished()
        if self._stored is not None:
            for ended in finished:
                if ended.job in self._storing:
                    del self._storing[ended.job]
                    self._stored += map(OffloadKey, ended.keys)
        return [
            JobResult(
                job_id=ended.job,
                success=ended.success,
                successful_keys=None if ended.success else [OffloadKey(key) for key in ended.keys],
                transfer_time=ended.seconds,
                transfer_bytes=ended.bytes,
            )
            for ended in finished
        ]

    def take_events(self) -> Iterable[OffloadingEvent]:
        # Like vLLM's own tiers, it reports stored keys only; the node's own events also report removals.
        told, self._stored = self._stored, [] if self._stored is not None else None
        return [OffloadingEvent(told, self.medium, removed=False, locality=self.locality, ownership=OWNER)] if told else []

    def has_pending_work(self) -> bool:
        return self._offload.has_jobs()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        # The node's chunks change, so the next request asks again.
        self._offload.forget(list(self._asked.pop(req_context.req_id, ())))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._offload.flush()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        # Only a load counts as use.
        return

    def drain_jobs(self) -> None:
        self._offload.drain()

    def shutdown(self) -> None:
        self._offload.close()
        self._node.close()


OWNER = "larder"
"""The owner of the chunks, in vLLM's events."""


HASH_BYTES = 32
"""The least bytes of a key that names a prompt safely. vLLM's keys end with the number of a group."""


def check_hash(key: bytes) -> None:
    """Raises `UnsupportedError` for a key with a short hash: two prompts may have the same one. vLLM does not tell its tiers the
    hash's name."""
    if len(key) < HASH_BYTES:
        raise UnsupportedError(
            "vLLM's hash of blocks (prefix_caching_hash_algo) has fewer than 256 bits, which name no prompt safely: use sha256_cbor"
        )


def rows_of(job: TransferJob) -> list[int]:
    return [int(row) for row in job.chunk_ids]


def namespace_of(spec: "OffloadingSpec", row_bytes: int, model_revision: str) -> larder_kv.NamespaceSpec:
    """The namespace. It contains the facts that vLLM's own file tier has in its paths, and three facts that the file tier leaves
    out: the layout, the kind of device, and the weights."""
    fields: dict[str, Any] = dict(FileMapper.from_offloading_spec("/", spec).fields)
    fields["device"] = current_platform.device_name
    if not spec.config.canonical_layout:
        fields["kv_cache_layout"] = spec.config.kv_cache_layout
    if not model_revision:
        # vLLM tells its tiers the model's name, and not its revision.
        fields["weights"] = weights_of(str(fields["model_name"]), None)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()
    tokens = int(fields["tokens_per_hash"])
    return larder_kv.NamespaceSpec(
        model=str(fields["model_name"]),
        revision=model_revision,
        kv_dtype=str(fields["dtype"]),
        layout=f"vllm offloading {digest}",
        chunk_tokens=tokens,
        engine_block_tokens=tokens,
        pools=[larder_kv.Pool(layers=1, layer_bytes=row_bytes)],
        flat=True,
    )
