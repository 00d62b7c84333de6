"""Messages between the scheduler half and the worker half: with each step, and back."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from larder_kv.vllm.plan import Load, Save


@dataclass
class StepPlan(KVConnectorMetadata):
    """One step's loads and saves."""

    step: int
    """Its number."""
    recovered: int
    """The last step that was planned when the scheduler last heard of a failed load; -1 before that. Steps behind it know of
    the failure."""
    actor: int | None
    """The number of the node's actor that the engine uses; None where the scheduler was not at the node yet."""
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are about to be overwritten."""
    is_idle: bool = False
    """Whether the engine computes nothing in it."""
    finished: list[str] = field(default_factory=list)
    """Requests whose blocks are freed when the workers say that they read them no more."""


@dataclass
class SavesEnded(KVConnectorWorkerMetadata):
    """Saves whose blocks are read no more, by number: how many of the ranks say so."""

    ranks: Counter[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "SavesEnded":
        """The reports of this and another rank together."""
        assert isinstance(other, SavesEnded)
        return SavesEnded(self.ranks + other.ranks)
