"""The connector's worker half: copies between this rank's blocks and the node."""

import atexit
import logging
from typing import TYPE_CHECKING

import torch

from larder_kv import PagedMemory
from larder_kv.vllm.counts import Counts
from larder_kv.vllm.engine import Engine
from larder_kv.vllm.layout import LayerTensor, layer_pages, page_bytes
from larder_kv.vllm.messages import StepPlan
from larder_kv.vllm.plan import Garbage
from larder_kv.vllm.settings import UnsupportedError
from larder_kv.vllm.transfer import LayerGate, Loader, Saver

if TYPE_CHECKING:
    from larder_kv.vllm.node import Node

logger = logging.getLogger("vllm.larder")

DRAIN_SECONDS = 10.0
"""How long an engine that ends waits for its last saves."""


class WorkerHalf:
    """Called by vLLM's model runner, on its thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.counts = engine, Counts()
        self._layers: dict[str, int] = {}
        self._node: Node | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._loaded: LayerGate | None = None
        self._computed: LayerGate | None = None
        self._finished: set[str] = set()
        self._garbage = Garbage()
        atexit.register(self.close)

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the KV caches, and opens the way to the node."""
        engine = self.engine
        names = [name for name in engine.layer_names if name in tensors]
        if len(names) != engine.facts.layers or len(tensors) != len(names):
            raise UnsupportedError(
                f"this rank has KV caches of {len(tensors)} layers, {len(names)} of them of the {engine.facts.layers} "
                "whose blocks are transferred: drafts of speculative decoding and the like are not supported"
            )
        memory = paged_memory(engine, [(name, tensors[name]) for name in names])
        self._layers = {name: number for number, name in enumerate(names)}
        slice_number = engine.slice_of_rank()
        self._node = engine.open_node([slice_number], engine.settings.window_bytes)
        self._node.wait_for_first_try(engine.settings.reconnect_seconds)
        self._loader = Loader(self._node, memory, engine.shape, self.counts)
        if engine.writes_its_slice():
            self._saver = Saver(self._node, memory, engine.shape, self.counts, engine.settings.save_queue_chunks)

    def preempt(self, plan: StepPlan) -> None:
        """Stops reading blocks before they are overwritten."""
        for request in plan.preempted:
            self._cancel(request)

    def start_loads(self, plan: StepPlan) -> None:
        """Begins the step's loads: synchronous ones are leased before this returns."""
        if self._loader is None or not plan.loads:
            return
        if self.engine.settings.load == "async":
            self._loader.load_soon(plan.loads)
            return
        self._loaded = self._loader.load_now(plan.loads)
        if self._loader.has_failed():
            self._garbage.load_failed(plan.step)

    def wait_for_layer(self, name: str) -> None:
        """Waits until the step may read the layer."""
        if self._loaded is not None and name in self._layers:
            self._loaded.wait(self._layers[name])

    def layer_computed(self, name: str, plan: StepPlan) -> None:
        """The step has written the layer: its saves may read it."""
        if plan.saves and name in self._layers:
            self._begin_saves(plan)
            if self._computed is not None:
                self._computed.open(self._layers[name])

    def end_step(self, plan: StepPlan) -> None:
        """The forward pass is over. Nothing waits here for saves."""
        if self._loaded is not None:
            self._loaded.wait_all()
            self._loaded = None
            if self._loader is not None and self._loader.has_failed():
                # Also where it failed after the step had begun: its saves still wait for their last layers.
                self._garbage.load_failed(plan.step)
                for save in plan.saves:
                    self._cancel(save.request)
        if plan.saves:
            self._begin_saves(plan)
        if self._computed is not None:
            self._computed.open_all()
            self._computed = None

    def finished(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """Requests whose blocks are read no more, and those whose loads have ended."""
        self._finished.update(plan.finished)
        saver = self._saver
        sent = {name for name in self._finished if saver is None or not saver.is_reading(name)}
        self._finished -= sent
        if saver is not None:
            for name in sent:
                saver.forget(name)
        return sent, self._loader.take_done() if self._loader else set()

    def failed_blocks(self) -> set[int]:
        """Blocks that did not come, since the last call."""
        return self._loader.take_failed() if self._loader else set()

    def close(self) -> None:
        """Ends what this half has begun. Threads must not be in native code when the interpreter goes down."""
        atexit.unregister(self.close)
        if self._loader is not None:
            self._loader.close()
        if self._saver is not None:
            self._saver.close(DRAIN_SECONDS)
        if self._node is not None:
            self._node.close()
        self._loader = self._saver = self._node = None

    def _cancel(self, request: str) -> None:
        if self._saver is not None:
            self._saver.cancel(request)

    def _begin_saves(self, plan: StepPlan) -> None:
        """Hands the step's saves over, once. None where the step computed from blocks that did not come."""
        if self._computed is not None or self._saver is None:
            return
        self._computed = LayerGate(len(self._layers))
        if not self._garbage.may_save(plan.recovered):
            self.counts.add("shed_chunks_gone", sum(len(save.hashes) - save.first_chunk for save in plan.saves))
            return
        self._saver.save_soon(plan.saves, self._computed)


def paged_memory(engine: Engine, tensors: list[tuple[str, torch.Tensor]]) -> PagedMemory:
    """The engine's blocks by their addresses."""
    regions: dict[int, torch.Tensor] = {}
    layers = []
    for name, tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"the KV cache is on {tensor.device}: this connector copies from and to host memory")
        storage = tensor.untyped_storage()
        region = regions.setdefault(storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage))
        layer = LayerTensor(
            name=name,
            region=list(regions).index(storage.data_ptr()),
            offset=tensor.data_ptr() - region.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            element_bytes=tensor.element_size(),
        )
        layers.append(layer_pages(layer, engine.facts.layout, engine.blocks, engine.shape.block_tokens))
    found = page_bytes(layers[0])
    if found != engine.facts.page_bytes:
        raise UnsupportedError(
            f"a block has {found} bytes in each layer, where {engine.facts.page_bytes} were expected"
        )
    buffers = [region.numpy() for region in regions.values()]
    return PagedMemory(buffers, layers, pages_per_chunk=engine.shape.pages_per_chunk)
