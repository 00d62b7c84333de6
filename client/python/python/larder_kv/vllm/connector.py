"""The class that vLLM loads: it passes each call to the half that this process has."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from larder_kv.vllm.engine import Engine
from larder_kv.vllm.messages import StepPlan
from larder_kv.vllm.metrics import LarderMetrics, LarderStats
from larder_kv.vllm.scheduler import SchedulerHalf
from larder_kv.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.larder")


class LarderConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads prefixes from a Larder cluster, and saves the chunks that this engine computes. Its settings are
    `larder_kv.vllm.settings.Settings`; interface: vLLM's KVConnectorBase_V1."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        engine = Engine.of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    'kv_load_failure_policy is "%s": a block that cannot be loaded fails its request. Set it to '
                    '"recompute" to have it computed instead',
                    transfer.kv_load_failure_policy,
                )
            saves = engine.settings.save and transfer.is_kv_producer
            self._scheduler = SchedulerHalf(engine, transfer.is_kv_consumer, saves)
        else:
            self._worker = WorkerHalf(engine)

    @property
    def requires_kv_delivery(self) -> bool:
        # A dropped save is only a later miss.
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "sync"

    # The scheduler's process.

    @property
    def _plans(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called in the process of a worker"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._plans.bind(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        return self._plans.is_copying()

    def has_pending_block_frees(self) -> bool:
        return self._plans.is_holding_blocks()

    def on_new_request(self, request: "Request") -> None:
        self._plans.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._plans.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._plans.update_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        return self._plans.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._plans.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._plans.update_output(connector_output)

    def reset_cache(self) -> bool:
        return self._plans.reset()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self._plans.take_events()

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._plans.end(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._plans.end(request)

    # The workers' processes.

    @property
    def _copies(self) -> WorkerHalf:
        assert self._worker is not None, "called in the process of the scheduler"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._copies.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepPlan)
        self._copies.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._copies.start_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._copies.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        self._copies.layer_computed(layer_name, self._plan)

    def wait_for_save(self) -> None:
        self._copies.end_step(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self._copies.finished(self._plan)
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received = self.get_finished(finished_req_ids)
        failed = self._copies.failed_requests(received or set())
        return KVConnectorTransferResults(sent or set(), received or set(), failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._copies.ended_saves()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copies.failed_blocks()

    # Both.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._scheduler or self._worker
        counts = half.counts.take() if half else {}
        return LarderStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return LarderStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return LarderMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
