"""The class that vLLM's own offloading loads as a tier below its host memory: `"type": "LarderTier"`, `"module_path":
"larder_kv.vllm"`.

vLLM moves blocks between GPUs and host memory; this moves them between host memory and the node.
"""

import hashlib
import json
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import larder_kv
from larder_kv.vllm.node import Node
from larder_kv.vllm.offload import Offload
from larder_kv.vllm.settings import TierSettings

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector


class LarderTier(SecondaryTierManager):
    """Chunks of vLLM's offloading in a Larder cluster, from the scheduler's process; interface: vLLM's SecondaryTierManager."""

    medium: ClassVar[Medium] = Medium.STORAGE

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
        settings = TierSettings.parse(given, "the tier LarderTier")
        namespace = namespace_of(offloading_spec, self.block_size_bytes, settings.model_revision)

        def open_session() -> larder_kv.Session:
            window_bytes = max(settings.window_bytes, self.block_size_bytes)
            return settings.open_session("larder-kv tier for vLLM", window_bytes, settings.device)

        self._node = Node(open_session, namespace, [0], settings.reconnect_seconds)
        self._node.wait_for_first_try(settings.reconnect_seconds)
        self._offload = Offload(self._node, primary_kv_view, self.block_size_bytes, settings.threads)
        self._asked: dict[str, set[OffloadKey]] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._asked.setdefault(req_context.req_id, set()).add(key)
        found = self._offload.lookup(key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._offload.store(job_metadata.job_id, list(job_metadata.keys), rows_of(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._offload.load(job_metadata.job_id, list(job_metadata.keys), rows_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            JobResult(
                job_id=ended.job,
                success=ended.success,
                successful_keys=None if ended.success else [OffloadKey(key) for key in ended.keys],
                transfer_time=ended.seconds,
                transfer_bytes=ended.bytes,
            )
            for ended in self._offload.finished()
        ]

    def has_pending_work(self) -> bool:
        return self._offload.has_jobs()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        # What the node has changes: the next request asks anew.
        self._offload.forget(list(self._asked.pop(req_context.req_id, ())))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._offload.flush()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        # A load is what counts as use.
        return

    def drain_jobs(self) -> None:
        self._offload.drain()

    def shutdown(self) -> None:
        self._offload.close()
        self._node.close()


def rows_of(job: TransferJob) -> list[int]:
    return [int(row) for row in job.chunk_ids]


def namespace_of(spec: "OffloadingSpec", row_bytes: int, model_revision: str) -> larder_kv.NamespaceSpec:
    """What must agree for bytes to be interchangeable is what vLLM's own file tier has in its paths."""
    fields: dict[str, Any] = FileMapper.from_offloading_spec("/", spec).fields
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
