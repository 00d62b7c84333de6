"""Messages between the scheduler half and the worker half: with each step, and back."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from larder_kv.namespace import NamespaceSpec
from larder_kv.vllm.plan import Load, Save


@dataclass
class StepPlan(KVConnectorMetadata):
    """One step's loads and saves."""

    step: int
    """Its number."""
    recovered: int
    """The last step that had been planned when the scheduler last heard of a failed load; -1 before that. Later steps know of the
    failure."""
    actor: int | None
    """The number of the node's actor that the engine uses; None if the scheduler has not reached the node yet."""
    namespace: NamespaceSpec
    """The scheduler's namespace. Some models change the configuration in the processes that load them."""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are about to be overwritten."""
    is_idle: bool = False
    """Whether the engine computes nothing in this step."""
    finished: list[str] = field(default_factory=list)
    """Requests whose blocks are freed when the workers report that they no longer read them."""


@dataclass
class SavesEnded(KVConnectorWorkerMetadata):
    """Saves whose blocks are no longer read, by number, with the number of ranks that report so."""

    ranks: Counter[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "SavesEnded":
        """The reports of this rank and another together."""
        assert isinstance(other, SavesEnded)
        return SavesEnded(self.ranks + other.ranks)
