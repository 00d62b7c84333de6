"""The connector's counters for vLLM's logs and Prometheus."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from larder_kv.vllm.counts import COUNTERS, summed

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class LarderStats(KVConnectorStats):
    """Counts since the last step, by name."""

    def reset(self) -> None:
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> "LarderStats":
        return LarderStats(summed(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not any(self.data.values())


class LarderMetrics(KVConnectorPromMetrics):
    """One counter for each name, `vllm:larder_NAME`."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._counters = {
            name: make(name=f"vllm:larder_{name}", documentation=meaning, labelnames=labelnames)
            for name, meaning in COUNTERS.items()
        }
        # A series that begins with its first count hides this count from Prometheus, which knows no rate without a 0 before it.
        for labels in self.per_engine_labelvalues.values():
            for counter in self._counters.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, more in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(more)
